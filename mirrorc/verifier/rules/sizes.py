"""Rules on symbolic sizes: whoever runs a region is told the sizes of its values."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from mirrorc.ir.program import ArgumentKind, Program, Stage
from mirrorc.torch_internals import is_symbolic, raw_symbols, size_key, symbols_in
from mirrorc.verifier.rules.programs import Violation
from mirrorc.verifier.rules.rule import Order, Scope, rule


@rule(since=Stage.CAPTURED, order=Order.REFERENCES)
def sizes_are_arguments(program: Program) -> Iterator[Violation]:
    """A graph of operators takes each symbol in the sizes of its values as an argument, before the graphs are outlined as
    arguments of the program. Operators are given sizes as values of such arguments, never as symbols."""
    if program.stage is Stage.CAPTURED:
        told = {argument.name for argument in program.arguments if argument.kind is ArgumentKind.SIZE}
        for i, graph in enumerate(program.shard_graphs):
            yield from _untold(graph, f"the graph of shard {i}", told)


@rule(since=Stage.OUTLINED, scope=Scope.GRAPH, order=Order.REFERENCES)
def regions_are_told_sizes(program: Program, graph: fx.Graph) -> Iterator[Violation]:
    """A region takes each symbol in the sizes of its values as an argument, and gives operators sizes as values of such
    arguments, never as symbols."""
    name = next((name for name, region in program.regions.items() if region.graph_module.graph is graph), None)
    if name is not None:
        yield from _untold(graph, f"region {name}", None)


def _untold(graph: fx.Graph, what: str, names: set[str] | None) -> Iterator[Violation]:
    given = [node for node in graph.find_nodes(op="placeholder") if is_symbolic(node.meta.get("val"))]
    told = {size_key(node.meta["val"]) for node in given if names is None or node.target in names}
    for node in graph.nodes:
        raw = raw_symbols([node.args, node.kwargs])
        if raw:
            yield Violation(f"{what} gives {node.name} the symbol {raw[0]}, which is known to no device", node)
        unknown = symbols_in(node.meta.get("val")) - told
        if unknown:
            yield Violation(f"{what} is not told {sorted(map(str, unknown))[0]}, a size of {node.name}", node)
