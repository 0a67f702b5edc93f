"""Cuts the captured graph into regions."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.cuts import Cut, cut_at_meetings, first_of_backward, moved_before_cuts, source_of_part
from mirrorc.ir import ops
from mirrorc.ir.buckets import are_cut
from mirrorc.ir.graph_edits import call, copy_node, source_of
from mirrorc.ir.names import identifier, unlike
from mirrorc.ir.nodes import calls_to, region_title
from mirrorc.ir.program import Program, Region, Stage
from mirrorc.messages.wording import counted, numbered
from mirrorc.torch_internals import (
    add_node,
    environment_of,
    has_symbols,
    is_symbolic,
    lazy_graph_module,
    size_key,
    sizes_key,
    symbols_in,
)


@dataclass(frozen=True)
class OutlineRegions:
    """Moves the operators of the captured graph into regions, cut where buckets become ready.

    ``fwd_0`` has the operators before backward. ``bwd_k`` ends with the last gradient of bucket k (or pack k). Equal
    bodies are one region with several calls. If the second shard shape has another body, its region is
    ``bwd_k_shard1``::

        addmm = aten.addmm(read_b, x, t)            fwd_0 = call_region(x, read_w, read_b, region=fwd_0)
        loss  = aten.mean(addmm)              ->    loss  = fwd_0[0]
        mm    = aten.mm(expand, x)                  bwd_0 = call_region(fwd_0[1], x, region=bwd_0)
        output {loss: loss, gradients: {w: mm}}     output {loss: loss, gradients: {w: bwd_0[0]}}

    A large value, such as the gradient of logits, may cross a cut only for operators with much smaller results. These
    operators then move before the cut. A model's collectives also cut regions; nothing moves across them.

    Needs: a bucket plan.
    Guarantees: outside of regions are only arguments, reads, region calls and their outputs, checks and gathers of
        these outputs, and the model's collectives.

    Attributes:
        min_bytes: operators do not move for smaller values.
    """

    min_bytes: int = 2**20
    name: str = field(default="outline-regions", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.OUTLINED, init=False)

    def run(self, program: Program) -> Program:
        pool = _RegionPool()
        graphs = tuple(
            _outline(graph, _pieces(graph, program, self.min_bytes), functools.partial(pool.add, i))
            for i, graph in enumerate(program.shard_graphs)
        )
        outlined = program.evolve(stage=Stage.OUTLINED, shard_graphs=graphs, regions=pool.regions)
        return outlined.with_remarks(_remark(outlined), is_kept=False)


def _remark(program: Program) -> str:
    calls = Counter(str(node.kwargs["region"]) for g in program.shard_graphs for node in calls_to(g, ops.call_region))
    backward = [name for name in calls if program.regions[name].phase == "backward"]
    num_pieces = sum(calls[name] for name in backward)
    num_forward, num_graphs = sum(calls.values()) - num_pieces, len(program.shard_graphs)
    forward = counted(num_forward, "forward")
    if num_forward > num_graphs:
        forward = f"{num_forward} pieces of forward, cut where replicas meet"
    remark = (
        f"{counted(num_pieces, 'piece')} of backward, cut after the last gradient of each of "
        f"{counted(len(program.packs), 'pack' if are_cut(program.buckets) else 'bucket')}, and {forward}"
    )
    if len(program.shard_graphs) > 1:
        remark += f", for {len(program.shard_graphs)} shard shapes together"
    if repeated := [region_title(name) for name in calls if calls[name] > 1]:
        verb = "is" if len(repeated) == 1 else "are"
        remark += (
            f". {numbered('region', repeated).capitalize()} {verb} called more than once: equal bodies are one region"
        )
    return remark


class _RegionPool:
    def __init__(self) -> None:
        self.regions: dict[str, Region] = {}
        self._by_body: dict[Any, str] = {}
        self._first_shape: dict[int, str] = {}  # the region of each piece, for the first shape of a shard

    def add(self, shard: int, piece: int, phase: str, graph: fx.Graph) -> str:
        key = (phase, _body_key(graph))
        if key not in self._by_body:
            name = self._free_name({"forward": "fwd", "backward": "bwd"}[phase], shard, piece)
            self.regions[name] = Region(name, phase, lazy_graph_module({}, graph, name))
            self._by_body[key] = name
        if not shard:
            self._first_shape[piece] = self._by_body[key]
        return self._by_body[key]

    def _free_name(self, prefix: str, shard: int, piece: int) -> str:
        variant = f"_shard{shard}" if shard else ""
        counterpart = self._first_shape.get(piece, "") + variant
        if shard and piece in self._first_shape and counterpart not in self.regions:
            return counterpart
        numbers = (number for number in itertools.count() if f"{prefix}_{number}" not in self.regions)
        return next(f"{prefix}_{n}{variant}" for n in numbers if f"{prefix}_{n}{variant}" not in self.regions)


def _body_key(graph: fx.Graph) -> Any:
    number = {node: i for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        detail = repr(fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}"))
        value = node.meta.get("val")
        typed: Any = (
            (sizes_key(value.shape), sizes_key(value.stride()), value.dtype) if isinstance(value, torch.Tensor) else ()
        )
        typed = (typed, environment_of(value)) if has_symbols(value) else typed  # it is compiled with their guards
        lines.append((node.op, str(node.target) if node.op == "call_function" else "", detail, typed))
    return tuple(lines)


def _outline(graph: fx.Graph, cut: Cut, add_region: Callable[[int, str, fx.Graph], str]) -> fx.Graph:
    outer = fx.Graph()
    pieces = [*cut.forward, *cut.backward]
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node.target is ops.read:
            values[node] = copy_node(outer, node, {})
    used_outside = _used_outside(pieces)
    captured: Any = graph.output_node().args[0]
    gradient_of = {node: name for name, node in captured["gradients"].items()}
    for i, nodes in enumerate(pieces):
        if nodes:
            name = functools.partial(add_region, i, "forward" if i < len(cut.forward) else "backward")
            region = _call(outer, nodes, used_outside, values, name)
            results = [node for node in nodes if node in used_outside]
            gradients = {gradient_of[node]: place for place, node in enumerate(results) if node in gradient_of}
            region.kwargs = {**region.kwargs, "gradients": gradients}
        for node in cut.meetings.get(i, ()):
            values[node] = copy_node(outer, node, values)
        if i >= len(cut.forward) - 1:
            for node in calls_to(graph, *ops.OF_FORWARD):
                if node not in values and all(source in values for source in node.all_input_nodes):
                    values[node] = copy_node(outer, node, values)
    output = fx.node.map_arg(graph.output_node().args[0], values.__getitem__)
    outer.output(output)
    return outer


def _pieces(graph: fx.Graph, program: Program, min_bytes: int) -> Cut:
    outside = (ops.read, *ops.OF_FORWARD, *ops.MEETINGS)
    body = [n for n in graph.nodes if n.op not in ("placeholder", "output") and n.target not in outside]
    first = first_of_backward(program, graph)
    if first is None:
        return cut_at_meetings(graph, [], [body]) if program.takes_tangents else cut_at_meetings(graph, body, [])
    output = graph.output_node().args[0]
    assert isinstance(output, dict)
    position = {node: i for i, node in enumerate(graph.nodes)}
    first_backward = position[first] if program.has_loss else 0
    of_forward = calls_to(graph, *ops.OF_FORWARD) if program.has_loss else ()  # else they gather gradients of arguments
    taken = [source for node in of_forward for source in node.all_input_nodes]
    must_be_forward = [n for n in (output["loss"], *output["writes"].values(), *taken) if n in position]
    assert all(position[source_of_part(n)] < first_backward for n in must_be_forward), (
        "backward starts before the loss is there"
    )
    ends = [
        max(position[output["gradients"][slot.variable]] for slot in bucket.slots_in(pack))
        for bucket, pack in program.packs
    ]
    for i in range(1, len(ends)):  # graphs of other shard shapes may have another order of gradients
        ends[i] = max(ends[i], ends[i - 1])
    piece_of: dict[fx.Node, int] = {}
    for node in body:
        if node.target is operator.getitem:
            piece = piece_of[source_of_part(node)]
        elif position[node] < first_backward:
            piece = 0
        else:
            piece = 1 + min(bisect.bisect_left(ends, position[node]), len(ends) - 1)
        piece_of[node] = piece
    if next(calls_to(graph, *ops.MEETINGS), None) is None:
        piece_of |= moved_before_cuts(piece_of, min_bytes)
    pieces = [[node for node in body if piece_of[node] == piece] for piece in range(len(ends) + 1)]
    return cut_at_meetings(graph, pieces[0], pieces[1:])


def _used_outside(pieces: Sequence[Sequence[fx.Node]]) -> set[fx.Node]:
    piece_of = {node: i for i, nodes in enumerate(pieces) for node in nodes}
    return {node for node, i in piece_of.items() if any(piece_of.get(user) != i for user in node.users)}


def _call(
    outer: fx.Graph,
    nodes: Sequence[fx.Node],
    used_outside: set[fx.Node],
    values: dict[fx.Node, fx.Node],
    name_of: Callable[[fx.Graph], str],
) -> fx.Node:
    body = fx.Graph()
    inside: dict[fx.Node, fx.Node] = {}
    members = set(nodes)
    inputs: dict[fx.Node, None] = {}
    for node in nodes:
        inputs.update(dict.fromkeys(n for n in node.all_input_nodes if n not in members))
    inputs.update(dict.fromkeys(_sizes_in([*inputs, *nodes])))
    taken: set[str] = set()
    for source in inputs:
        name = unlike(taken, _argument_name(source))
        inside[source] = body.placeholder(name)
        taken.add(name)
        inside[source].meta["val"] = source.meta["val"]
    for node in nodes:
        inside[node] = copy_node(body, node, inside)
    results = [node for node in nodes if node in used_outside]
    body.output(tuple(inside[node] for node in results))
    region = call(outer, ops.call_region, tuple(values[n] for n in inputs), {"region": name_of(body)})
    region.meta = _call_meta(results, nodes)
    for i, node in enumerate(results):
        values[node] = add_node(outer, "call_function", operator.getitem, (region, i), {}, node.name)
        values[node].meta.update(node.meta)
    return region


def _sizes_in(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    symbols = symbols_in([node.meta.get("val") for node in nodes])
    arguments = nodes[0].graph.find_nodes(op="placeholder") if symbols else ()
    return [node for node in arguments if is_symbolic(node.meta.get("val")) and size_key(node.meta["val"]) in symbols]


def _call_meta(results: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> dict[str, Any]:
    meta: dict[str, Any] = {"val": tuple(node.meta["val"] for node in results)}
    for node in reversed(nodes):
        if node.meta.get("stack_trace"):
            return meta | source_of(node)
    return meta


def _argument_name(source: fx.Node) -> str:
    if source.target is ops.read:
        return identifier(str(source.kwargs["variable"]))
    return source.name
