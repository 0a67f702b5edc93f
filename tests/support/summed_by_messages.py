"""Runs the messages of an algorithm of all-reduce on given tensors, in one thread and without a model."""

from collections.abc import Sequence
from typing import Any

import torch
from tiny_programs import Weight, core_pipeline, handmade, run_up_to
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to, replica_of
from mirrorc.ir.program import Program
from mirrorc.ir.routes import send_to
from mirrorc.packing import ByBytes
from mirrorc.passes import ShareParameters
from mirrorc.passes.all_reduce import AllReduceAlgorithm


def linked(num_devices: int, *lengths: int, dtype: torch.dtype = torch.float32, link: str = "copy") -> Program:
    """A program with linked all_reduces: a bucket for each length, the first weight's last, which devices have copies of."""
    weights = [Weight(f"w{i}", (length,), dtype) for i, length in enumerate(lengths)]
    return run_up_to("lower-collectives", handmade(num_devices, weights), link=link, buckets=ByBytes(1e-9, 1e-9))


def linked_by_shares(
    num_devices: int, *lengths: int, dtype: torch.dtype = torch.float32, link: str = "copy"
) -> Program:
    """The same of devices that share one copy of the parameters: reduce_scatters."""
    weights = [Weight(f"w{i}", (length,), dtype) for i, length in enumerate(lengths)]
    before = run_up_to("schedule-overlap", handmade(num_devices, weights), buckets=ByBytes(1e-9, 1e-9))
    (lower,) = [one for one in core_pipeline(link=link) if one.name == "lower-collectives"]
    return lower.run(ShareParameters().run(before))


def averaging(program: Program) -> Program:
    """The program with means in place of sums, as no pass makes them: gradients of a step are weighted to be summed."""
    for node in calls_to(program.mirrored_graph, *ops.REDUCTIONS):
        node.kwargs = {**node.kwargs, "op": "mean"}
    return program


def summed(program: Program, packed: Sequence[torch.Tensor], bucket: int = 0) -> list[torch.Tensor]:
    """What each replica's update of a bucket takes, if the replicas have packed these tensors; of those that have an update."""
    values: dict[fx.Node, torch.Tensor] = {}

    def value(node: fx.Node) -> torch.Tensor:
        if node not in values:
            values[node] = made(node)
        return values[node]

    def made(node: fx.Node) -> torch.Tensor:
        if node.target is ops.pack:
            return packed[int(node.kwargs["replica"])]  # type: ignore[arg-type, call-overload]
        if node.target is ops.wait:
            sent: Any = send_to(program, node.all_input_nodes[0])
            return value(sent.args[0])
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value)
        return node.target(*args, **kwargs)  # type: ignore[operator, no-any-return]

    updates = [node for node in calls_to(program.mirrored_graph, ops.update) if bucket_of(node) == bucket]
    return [value(node.all_input_nodes[0]) for node in sorted(updates, key=replica_of)]  # type: ignore[arg-type]


def run(
    algorithm: AllReduceAlgorithm, packed: Sequence[torch.Tensor], before: Program | None = None
) -> list[torch.Tensor]:
    """The sum of these tensors of one length on each of as many devices, by an algorithm; ``before``: in this program."""
    before = before or linked(len(packed), len(packed[0]), dtype=packed[0].dtype)
    gap = before.buckets[0].num_elements - len(packed[0])  # buckets are longer
    found = summed(algorithm.run(before), [torch.nn.functional.pad(one, (0, gap)) for one in packed])
    return [one[: len(packed[0])] for one in found]
