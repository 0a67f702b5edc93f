"""Gradients that a graph takes from a backward of plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from mirrorc.custom_ops.eager_calls import take_gradient
from mirrorc.ir.nodes import calls_to


@dataclass(frozen=True)
class TakenGradients:
    """The gradients that a graph takes from one backward.

    Attributes:
        token: the token of the forward run ``call``.
        tangent: the loss's gradient: backward begins with it.
        nodes: the gradients of the parameters at ``places``.
    """

    call: int
    token: fx.Node
    tangent: fx.Node
    places: tuple[int, ...]
    nodes: tuple[fx.Node, ...]


def taken_gradients(graph: fx.Graph) -> list[TakenGradients]:
    takes: dict[Any, list[fx.Node]] = {}
    for node in calls_to(graph, take_gradient):
        takes.setdefault(node.args[:3], []).append(node)
    return [
        TakenGradients(call, token, tangent, tuple(cast("int", node.args[4]) for node in nodes), tuple(nodes))
        for (call, token, tangent), nodes in takes.items()
    ]


def places_of_arguments(graph: fx.Graph, values: Sequence[fx.Node]) -> list[int]:
    """Raises ValueError if a value is not an argument of the graph."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return [placeholders.index(value) for value in values]
