"""Which graphs were verified after earlier passes, and need not be verified again."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from mirrorc.ir.program import Program
from mirrorc.verifier.rules.dataflow import KnownFlows


class Checked:
    """Remembers what was verified after earlier passes: most leave most regions alone, and all go on from the last program."""

    def __init__(self) -> None:
        self.flows = KnownFlows()
        self._checked: dict[int, tuple[fx.Graph, list[Any]]] = {}
        self._changed: set[int] = set()

    def look_again(self) -> None:
        """Finds out which of the graphs that were checked have been changed since, by a pass that must give new ones."""
        self._changed = {
            key for key, (graph, parts) in self._checked.items() if not _are_the_same(parts, _parts(graph))
        }

    def was_changed(self, graph: fx.Graph) -> bool:
        """Whether this graph was checked, and had been changed when last looked at."""
        return self._is_known(graph) and id(graph) in self._changed

    def has(self, graph: fx.Graph) -> bool:
        """Whether this graph was checked, and was as it had been when last looked at."""
        return self._is_known(graph) and id(graph) not in self._changed

    def add(self, program: Program) -> None:
        """Notes that a program's graphs are right."""
        graphs = _all_graphs(program)
        parts = [self._checked[id(graph)][1] if self.has(graph) else _parts(graph) for graph in graphs]
        self._checked = {id(graph): (graph, found) for graph, found in zip(graphs, parts, strict=True)}
        self._changed = set()

    def _is_known(self, graph: fx.Graph) -> bool:
        return id(graph) in self._checked and self._checked[id(graph)][0] is graph


def _parts(graph: fx.Graph) -> list[Any]:
    """What a graph consists of. Nodes' arguments are immutable, so a changed one is another object."""
    return [part for node in graph.nodes for part in (node, node.target, node.args, node.kwargs, node.meta.get("val"))]


def _are_the_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _all_graphs(program: Program) -> list[fx.Graph]:
    return [*program.graphs(), *(region.graph_module.graph for region in program.regions.values())]
