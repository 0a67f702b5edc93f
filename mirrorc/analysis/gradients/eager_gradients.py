"""Finds which gradients regions take from backwards that run as plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from mirrorc.custom_ops.eager_calls import take_gradient
from mirrorc.ir.nodes import calls_to


@dataclass(frozen=True)
class Taken:
    """What a graph takes from one backward.

    Attributes:
        call: the number of the call whose backward it is.
        token, tangent: what says which backward, as in the graph.
        places: of the parameters, in the order in which their gradients are taken.
        nodes: which take them.
    """

    call: int
    token: fx.Node
    tangent: fx.Node
    places: tuple[int, ...]
    nodes: tuple[fx.Node, ...]


def taken_gradients(graph: fx.Graph) -> list[Taken]:
    """What a graph takes, a record for each backward, in the order of first takes."""
    found: dict[Any, list[fx.Node]] = {}
    for node in calls_to(graph, take_gradient):
        found.setdefault(node.args[:3], []).append(node)
    return [
        Taken(call, token, tangent, tuple(cast("int", node.args[4]) for node in nodes), tuple(nodes))
        for (call, token, tangent), nodes in found.items()
    ]


def places_of_arguments(graph: fx.Graph, values: Sequence[fx.Node]) -> list[int]:
    """The places of values among a graph's arguments.

    Raises:
        ValueError: one is no argument.
    """
    given = [node for node in graph.nodes if node.op == "placeholder"]
    return [given.index(value) for value in values]
