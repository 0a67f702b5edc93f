"""Recorded steps made by hand, from the durations of calls."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from tiny_programs import SMALL_BUCKETS, Weight, handmade
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import call_name
from mirrorc.ir.program import Program
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.runtime.profiling.explain_steps import explain_steps
from mirrorc.runtime.profiling.explanation import Explanation
from mirrorc.runtime.profiling.figures import BucketTimes
from mirrorc.runtime.profiling.recorder import Call, RecordedStep

MS = 10**6  # nanoseconds
Durations = Mapping[str, float]  # milliseconds of calls by name; others take none; of a wait, after the last launch
TWO = (Weight("fc1", (64, 1024)), Weight("fc2", (1024,)))  # bucket 0 has fc2, 4 KiB; bucket 1 fc1, 256 KiB
MEBIBYTE = 2**18  # elements of float32


def program_of(
    num_devices: int = 2,
    weights: Sequence[Weight] = TWO,
    *,
    without: Sequence[str] = (),
    link: str | None = None,
    uneven: bool = False,
    **options: Any,
) -> Program:
    """A lowered program with a bucket for each weight; ``link`` in place of what carries its collectives."""
    passes = [one for one in default_pipeline(**{**SMALL_BUCKETS, **options}) if one.name not in without]  # type: ignore[arg-type]
    program = run_passes(handmade(num_devices, weights, uneven=uneven), passes)
    for graph in program.graphs():
        for node in graph.nodes:
            if link is not None and "link" in node.kwargs:
                node.kwargs = {**node.kwargs, "link": link}
    return program


def called(graph: fx.Graph) -> list[fx.Node]:
    silent = (ops.read, ops.slot, operator.getitem)
    return [n for n in graph.nodes if n.op not in ("placeholder", "output") and n.target not in silent]


def is_awaited(pending: fx.Node, replica: int, launch: fx.Node, of: int) -> bool:
    if launch.kwargs.get("bucket") != pending.kwargs["bucket"]:
        return False
    if pending.target is ops.recv:
        hop = (launch.target is ops.send, of, launch.kwargs.get("destination"))
        tags = [[node.kwargs.get(word, 0) for word in ("round", "chunk")] for node in (launch, pending)]
        return hop == (True, pending.kwargs["source"], replica) and tags[0] == tags[1]
    return launch.target is pending.target


def recorded(program: Program, *durations: Durations, warms_up: bool = False, begun_ms: float = 0.0) -> RecordedStep:
    """A step as it would be recorded: a wait ends so many ms after the last launch that it needs, or after it begins."""
    todo = [called(module.graph) for module in program.device_graphs.values()]
    now = [round((begun_ms + own.get("start", 0.0)) * MS) for own in durations]
    started, calls = tuple(now), [[] for _ in todo]  # type: ignore[var-annotated]
    ends: dict[tuple[int, fx.Node], int] = {}
    while any(todo):
        for replica, nodes in enumerate(todo):
            while nodes:
                begins = now[replica]
                if nodes[0].target is ops.wait:
                    pending = nodes[0].args[0]
                    needed = [(r, n) for r, m in enumerate(program.device_graphs.values()) for n in called(m.graph)]
                    needed = [(r, n) for r, n in needed if is_awaited(pending, replica, n, r)]  # type: ignore[arg-type]
                    if any(key not in ends for key in needed):
                        break
                    begins = max([begins, *(ends[key] for key in needed)])
                node = nodes.pop(0)
                end = begins + round(durations[replica].get(call_name(node), 0.0) * MS)
                calls[replica].append(Call(node, now[replica], end))
                ends[replica, node] = now[replica] = end
    return RecordedStep(warms_up, round(begun_ms * MS), started, tuple(map(tuple, calls)))


def explained(program: Program, *durations: Durations) -> Explanation:
    return explain_steps(program, [recorded(program, *durations)])


def figures(times: BucketTimes) -> tuple[float, ...]:
    names = ("ready", "launched", "waited", "finished", "hidden", "exposed", "skew", "transfer")
    return tuple(getattr(times, f"{name}_ms") for name in names)


EVEN = {"start": 1.0, "fwd_0": 4.0, "bwd_0": 2.0, "bwd_1": 3.0, "pack b0": 0.5, "reduce_scatter b1": 0.25}
SIZED = {
    "start": 1.0,
    "fwd_0": 4.0,
    "bwd_0": 2.0,
    "bwd_1": 3.0,
    "wait b1": 1.0,
    "update b1": 2.0,
}  # bucket 0 is for free
DONE = {"wait b1": 1.0, "update b1": 2.0, "wait b0": 0.5, "update b0": 1.0}
