"""Rules on backwards that run as plain PyTorch. A parameter may have no gradient there."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.analysis.gradients.eager_gradients import taken_gradients
from mirrorc.custom_ops.eager_calls import take_gradient
from mirrorc.ir.nodes import calls_to, is_region_call, region_of
from mirrorc.ir.program import Program, Stage
from mirrorc.verifier.rules.rule import Violation, rule


@rule(since=Stage.CAPTURED)
def updates_leave_out_unused_parameters(program: Program) -> Iterator[Violation]:
    """If backward runs as plain PyTorch, updates leave out the parameters that no replica has used. In other programs,
    each step computes each gradient.
    """
    bodies = (*program.shard_graphs, *(region.graph_module.graph for region in program.regions.values()))
    runs_plain = any(next(calls_to(graph, take_gradient), None) is not None for graph in bodies)
    for bucket in program.buckets:
        if bucket.rule.may_be_unused is not runs_plain:
            why = "is updated as if each step used all of it" if runs_plain else "may be left out of a step"
            backward = "runs as plain PyTorch" if runs_plain else "makes each gradient in each step"
            yield Violation(f"bucket {bucket.index} {why}, but backward {backward}")


@rule(since=Stage.CAPTURED)
def a_gradient_is_taken_once(program: Program) -> Iterator[Violation]:
    """Each gradient of a plain PyTorch backward is used once. All are computed from the same gradient of the loss, and
    from the forward of their token.
    """
    for graph in program.graphs():
        taken, begun = set[tuple[Any, ...]](), dict[Any, Any]()
        for node, of in _takes(program, graph):
            call, token, tangents, place = of
            if (token, place) in taken:
                yield Violation(f"{node.name} takes gradient {place} of a backward from which it is taken before", node)
            if begun.setdefault(token, (call, tangents)) != (call, tangents):
                yield Violation(
                    f"{node.name} takes a gradient of a backward that has begun with another gradient of the loss", node
                )
            taken.add((token, place))


@rule(since=Stage.OUTLINED)
def regions_take_gradients_by_tokens(program: Program) -> Iterator[Violation]:
    """A region that uses gradients of a plain PyTorch backward takes its token and tangents as arguments. Its caller
    can therefore wait for the gradients.
    """
    for region in program.regions.values():
        for taken in taken_gradients(region.graph_module.graph):
            if any(value.op != "placeholder" for value in taken.sources):
                yield Violation(
                    f"region {region.name} computes by itself of which backward it takes gradients", taken.nodes[0]
                )


def _takes(program: Program, graph: fx.Graph) -> Iterator[tuple[fx.Node, tuple[Any, ...]]]:
    for node in graph.nodes:
        if node.target is take_gradient:
            call, token, tangent, _, place, *tangents = node.args
            yield node, (call, _part(token), (tangent, *itertools.chain(*tangents)), place)
        elif is_region_call(node) and region_of(node) in program.regions:
            body = program.regions[region_of(node)].graph_module.graph
            arguments = dict(zip(body.find_nodes(op="placeholder"), node.args, strict=True))
            for taken in taken_gradients(body):
                token, *tangents = (arguments.get(value, value) for value in taken.sources)
                for place in taken.places:
                    yield node, (taken.call, _part(token), tuple(tangents), place)


def _part(value: Any) -> Any:
    return tuple(value.args) if isinstance(value, fx.Node) and value.target is operator.getitem else value
