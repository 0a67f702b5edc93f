"""Programs that only reduce, to study an algorithm, and pictures of their messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.buckets.bucket_parts import BucketParts
from mirrorc.analysis.cost.message_costs import Message, messages, times_of
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Slot
from mirrorc.ir.devices import parse_devices
from mirrorc.ir.graph_edits import call, insert
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.ir.routes import Route
from mirrorc.ir.variables import Role, UpdateRule, Variable
from mirrorc.passes.all_reduce.algorithm import AllReduceAlgorithm
from mirrorc.torch_internals import FakeTensorMode


def sketched(
    algorithm: AllReduceAlgorithm, num_devices: int, num_elements: int, link: str = "copy", *, num_buckets: int = 1
) -> Program:
    """A program on logical CPUs that all-reduces its weights."""
    names, shape, rule = [f"weight_{i}" for i in range(num_buckets)], (num_elements,), UpdateRule("SGD group 0", 0)
    slots = [Slot(name, shape, (1,), 0, num_elements) for name in names]
    program = Program(
        stage=Stage.SCHEDULED,
        devices=parse_devices([f"cpu:{i}" for i in range(num_devices)]),
        variables={name: Variable(name, shape, (1,), torch.float32, Role.PARAMETER, update=rule) for name in names},
        arguments=(),
        graph=fx.Graph(),
        buckets=tuple(Bucket(i, torch.float32, (slot,), num_elements, rule) for i, slot in enumerate(slots)),
        properties=(Property.LINKED,),
    )
    graph = program.mirrored_graph
    end = graph.output({"losses": (None,) * num_devices})

    def put(target: Any, *args: fx.Node, **keywords: Any) -> fx.Node:
        return insert(program, end, target, args, keywords)

    with FakeTensorMode():
        weight = torch.empty(shape)
    launches = []
    for bucket, name in enumerate(names):
        packs = []
        for replica in range(num_devices):
            with graph.inserting_before(end):
                read = call(graph, ops.read, (), {"variable": name, "replica": replica})
            read.meta["val"] = weight
            packs.append(put(ops.pack, read, bucket=bucket, replica=replica))
        launches.append(put(ops.all_reduce, *packs, bucket=bucket, op="sum", link=link))
    for bucket, launch in enumerate(launches):
        for replica in range(num_devices):
            put(ops.update, put(ops.wait, launch, bucket=bucket, replica=replica), bucket=bucket, replica=replica)
    return algorithm.run(program)


_COLUMN, _BUCKET, _TOP, _SIDE = 150, 96, 52, 60  # pixels: between devices, a bucket's time, above and beside
_PARTIAL, _WHOLE = "#b45309", "#1d4ed8"
_STYLE = "font-family: sans-serif; font-size: 12px"


def message_picture(program: Program) -> str:
    """Draws the messages of a program's buckets, which must have one size, as SVG.

    Time runs downwards. A device sends one message at a time (see `MessageCosts.path_bytes`). Partial sums are brown,
    whole sums blue.
    """
    sent = messages(program)
    times, size = times_of(sent), program.buckets[0].num_bytes
    end = max((stop for _, stop in times.values()), default=0)
    height = round(_TOP + _BUCKET * end / size + 34)
    width = 2 * _SIDE + _COLUMN * (program.num_replicas - 1)
    lines = [*_lanes(program, height), *_arrows(program, sent, times, size)]
    marks = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{color}"/></marker>'
        for name, color in (("partial", _PARTIAL), ("whole", _WHOLE))
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'style="{_STYLE}">',
            f"<defs>{marks}</defs>",
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *lines,
            f'<text x="{width / 2:g}" y="{height - 8}" text-anchor="middle" fill="#444">done after the time of '
            f"{_number(end / size)} buckets</text>",
            "</svg>\n",
        ]
    )


def _lanes(program: Program, height: int) -> Iterator[str]:
    for replica, device in enumerate(program.devices):
        x = _SIDE + _COLUMN * replica
        yield f'<text x="{x}" y="20" text-anchor="middle" font-weight="bold">{device.name}</text>'
        yield f'<line x1="{x}" y1="30" x2="{x}" y2="{height - 26}" stroke="#999" stroke-width="2"/>'


def _arrows(program: Program, sent: list[Message], times: Mapping[Route, tuple[int, int]], size: int) -> Iterator[str]:
    parts, everyone = BucketParts(program), frozenset(program.reduced_replicas)
    for message in sent:
        route, part = message.route, parts.of(message.node.args[0])
        assert part is not None, "it is a message of gradients"
        name = "whole" if all(span.replicas == everyone for span in part.spans) else "partial"
        color = _WHOLE if name == "whole" else _PARTIAL
        (x1, x2), (y1, y2) = (
            [_SIDE + _COLUMN * replica for replica in (route.source, route.destination)],
            [_TOP + _BUCKET * time / size for time in times[route]],
        )
        aside = 3 if x1 < x2 else -3
        line = f'x1="{x1 + aside}" y1="{y1:g}" x2="{x2 - aside}" y2="{y2:g}"'
        yield f'<line {line} stroke="{color}" stroke-width="1.5" marker-end="url(#{name})"/>'
        near = min(0.5, 40 / abs(x2 - x1))
        x, y = x1 + near * (x2 - x1), y1 + near * (y2 - y1)
        text = _elements(part.spans[0].start, part.spans[-1].stop, program.buckets[message.route.bucket].num_elements)
        text += f" of {message.route.bucket}" if len(program.buckets) > 1 else ""
        yield (
            f'<text x="{x:g}" y="{y - 2:.1f}" text-anchor="middle" fill="{color}" stroke="white" stroke-width="3" '
            f'paint-order="stroke" font-size="10">{text}</text>'
        )


def _elements(start: int, stop: int, length: int) -> str:
    return "all" if (start, stop) == (0, length) else f"{_number(100 * start / length)}-{_number(100 * stop / length)}%"


def _number(number: float) -> str:
    return f"{round(number, 1):g}"
