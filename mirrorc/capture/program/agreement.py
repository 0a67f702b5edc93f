"""Checks that the graphs of all kinds of shards belong to one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mirrorc.capture.program.captured_graph import CapturedGraph
from mirrorc.errors import CaptureError


def check_agreement(captured: Sequence[CapturedGraph], model_name: str) -> None:
    """Checks that the graphs of all shard shapes make the same gradients and draw random numbers in the same places."""
    first, *others = captured
    for other in others:
        if list(first.traced.guards.draws) != list(other.traced.guards.draws):
            raise CaptureError(
                f"{model_name} draws other numbers from Python's random for a shard of another size, one for each example "
                "perhaps, and a step draws the same for all replicas. Remedy: draw them with torch, as in torch.rand(len(x)), "
                "or earlier"
            )
        for part in ("gradients", "writes"):
            if set(_results(first)[part]) != set(_results(other)[part]):
                raise CaptureError(
                    f"{model_name} makes other {part} for a shard of another size: its graph depends on the batch size; use "
                    "batches that divide by the number of devices"
                )
        if [argument.kind for argument in first.arguments] != [argument.kind for argument in other.arguments]:
            raise CaptureError(
                f"{model_name} draws random numbers for some shard sizes only; use batches that divide evenly"
            )


def _results(captured: CapturedGraph) -> Any:
    return captured.graph.output_node().args[0]
