"""Rules on which replicas have examples: a replica of a small batch runs all of forward and backward, or nothing of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import is_region_call, name_of, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.routes import place_of
from mirrorc.verifier.rules.programs import Violation, scopes
from mirrorc.verifier.rules.rule import Order, rule

_OF_FORWARD_AND_BACKWARD = (ops.argument, ops.slot, ops.check, ops.gather, ops.write)


@rule(since=Stage.CAPTURED, order=Order.REFERENCES)
def some_replica_has_examples(program: Program) -> Iterator[Violation]:
    """At least one replica has examples, unless those of other workers may have some; and before the graphs are replicated each
    that has some runs a graph, no other one."""
    if not program.present and not program.workers.are_several:
        yield Violation(f"the numbers of examples are {program.num_examples}: there is nothing to learn from")
    if program.stage < Stage.REPLICATED:
        for replica, shard in enumerate(program.shard_of_replica):
            if (shard is not None) != (replica in program.present):
                runs, has = ("runs no graph", "has") if shard is None else (f"runs graph {shard}", "has no")
                yield Violation(f"replica {replica} {runs}, but {has} examples")


@rule(since=Stage.REPLICATED, order=Order.REFERENCES)
def replicas_without_examples_run_nothing(program: Program) -> Iterator[Violation]:
    """A replica without examples has no arguments, regions, slots, factors, checks, meetings, outputs, writes of buffers, and no
    loss; one with examples has a loss. All replicas take part in collectives, commits and updates alike."""
    for where, graph, _ in scopes(program):
        for node in graph.nodes:
            if node.op == "output" or not _is_of_forward_or_backward(node):
                continue
            own = replica_of(node)
            replica = place_of(program, graph) if own is None else own
            if replica not in program.present:
                yield Violation(f"{name_of(node)} runs on {where(own)}, which has no examples", node)
        output: Any = graph.output_node().args[0]
        here = [place_of(program, graph)] if program.graph is None else range(program.num_replicas)
        losses = output["losses"] if isinstance(output, dict) else [output]
        for replica, loss in zip(here, losses if program.trains else (), strict=False):  # an evaluation has none
            if (loss is not None) != (replica in program.present):
                has = "gives no loss, but has" if loss is None else "gives a loss, but has no"
                yield Violation(f"{where(replica)} {has} examples", graph.output_node())


def _is_of_forward_or_backward(node: fx.Node) -> bool:
    is_operation = any(node.target in some for some in (_OF_FORWARD_AND_BACKWARD, ops.FACTORED, ops.MEETINGS))
    return is_operation or node.op == "placeholder" or is_region_call(node)
