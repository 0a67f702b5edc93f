"""The rule that tells training steps from evaluations, which have forward alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Accumulation, Program, Stage
from mirrorc.verifier.rules.programs import Violation, losses_of, scopes
from mirrorc.verifier.rules.rule import rule


@rule(since=Stage.CAPTURED)
def losses_are_for_training(program: Program) -> Iterator[Violation]:
    """A program that takes a weight of the loss trains. One that takes none evaluates: it has no bucket, no variable with an
    update rule and no region of backward, returns no loss and no gradient, and accumulates none."""
    for graph in program.shard_graphs:
        output: Any = graph.output_node().args[0]
        if program.trains is not isinstance(output["loss"], fx.Node):
            yield Violation(f"the graph of a shard returns the loss {output['loss']}: {_kind(program)}")
        if output["gradients"] and not program.trains:
            yield Violation(f"the graph of a shard returns gradients: {_kind(program)}")
    for where, graph, replicas in scopes(program):
        if losses_of(graph) and not program.trains:
            yield Violation(f"{where(replicas[0])} returns a loss: {_kind(program)}")
    if not program.trains:
        yield from _signs_of_training(program)


def _kind(program: Program) -> str:
    return "the program trains" if program.trains else "the program evaluates"


def _signs_of_training(program: Program) -> Iterator[Violation]:
    if program.buckets:
        yield Violation(f"{_kind(program)}, but has a plan of {len(program.buckets)} buckets")
    if program.accumulation is not Accumulation.NONE:
        yield Violation(f"{_kind(program)}, but is {program.accumulation.value}")
    for variable in program.variables.values():
        if variable.update is not None:
            yield Violation(f"{_kind(program)}, but the optimizer updates {variable.name}")
    for region in program.regions.values():
        if region.phase == "backward":
            yield Violation(f"{_kind(program)}, but {region.name} is a region of backward")
    if program.stage < Stage.UPDATED:
        return
    for where, graph, replicas in scopes(program):
        if next(calls_to(graph, *ops.UPDATES), None) is not None:
            yield Violation(f"{where(replicas[0])} updates parameters: {_kind(program)}")
