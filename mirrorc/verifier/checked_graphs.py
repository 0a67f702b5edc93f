"""Remembers verified graphs, so that the verifier skips them after the next pass."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import fx

from mirrorc.ir.program import Program
from mirrorc.verifier.rules.dataflow import KnownFlows


class VerifiedGraphs:
    """The last verified program's graphs, and known dataflow. Most passes leave most regions unchanged."""

    def __init__(self) -> None:
        self.flows = KnownFlows()
        self._checked: dict[int, tuple[fx.Graph, list[Any]]] = {}
        self._changed: set[int] = set()
        self._last: list[Any] = []  # the contents of the last program

    def refresh(self) -> None:
        """Notes which verified graphs were changed in place. Passes must return new graphs instead."""
        self._changed = {
            key for key, (graph, parts) in self._checked.items() if not _are_the_same(parts, _parts(graph))
        }

    def was_changed(self, graph: fx.Graph) -> bool:
        return self._is_known(graph) and id(graph) in self._changed

    def has(self, graph: fx.Graph) -> bool:
        return self._is_known(graph) and id(graph) not in self._changed

    def is_last(self, program: Program) -> bool:
        """True if a program equals the last verified one, except for remarks."""
        return _contents(program) == self._last and all(map(self.has, all_graphs(program)))

    def add(self, program: Program) -> None:
        graphs = all_graphs(program)
        parts = [self._checked[id(graph)][1] if self.has(graph) else _parts(graph) for graph in graphs]
        self._checked = {id(graph): (graph, contents) for graph, contents in zip(graphs, parts, strict=True)}
        self._changed, self._last = set(), _contents(program)

    def _is_known(self, graph: fx.Graph) -> bool:
        return id(graph) in self._checked and self._checked[id(graph)][0] is graph


def _parts(graph: fx.Graph) -> list[Any]:
    """Parts are compared by identity: arguments are immutable, so a changed argument is a new object."""
    return [part for node in graph.nodes for part in (node, node.target, node.args, node.kwargs, node.meta.get("val"))]


def _contents(program: Program) -> list[Any]:
    values = (getattr(program, field.name) for field in fields(program) if field.name != "remarks")
    return [dict(value) if isinstance(value, Mapping) else value for value in values]  # a table may be changed in place


def _are_the_same(parts: list[Any], other: list[Any]) -> bool:
    return len(parts) == len(other) and all(map(operator.is_, parts, other))


def all_graphs(program: Program) -> list[fx.Graph]:
    return [*program.graphs(), *(region.graph_module.graph for region in program.regions.values())]
