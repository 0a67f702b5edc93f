"""Gradients that a graph takes from a backward in plain PyTorch, and runs that exchange values with other replicas."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import fx

from mirrorc.custom_ops.eager_calls import OPAQUE, take_gradient
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program


@dataclass(frozen=True)
class TakenGradients:
    """The gradients that a graph takes from one backward.

    Attributes:
        tangent: the loss's gradient, with which backward begins; None for 1.
        tangents: the gradients of outputs of a module without a loss.
    """

    call: int
    token: fx.Node
    tangent: fx.Node | None
    tangents: tuple[fx.Node, ...]
    places: tuple[int, ...]
    nodes: tuple[fx.Node, ...]

    @property
    def sources(self) -> list[fx.Node]:
        return [self.token, *([self.tangent] if self.tangent is not None else []), *self.tangents]


def taken_gradients(graph: fx.Graph) -> list[TakenGradients]:
    takes: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in calls_to(graph, take_gradient):
        arguments: Any = node.args
        call, token, tangent, _, _, *tangents = arguments
        takes.setdefault((call, token, tangent, tuple(itertools.chain(*tangents))), []).append(node)
    return [
        TakenGradients(call, token, tangent, tangents, tuple(cast("int", n.args[4]) for n in nodes), tuple(nodes))
        for (call, token, tangent, tangents), nodes in takes.items()
    ]


def places_of_arguments(graph: fx.Graph, values: Sequence[fx.Node]) -> list[int]:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return [placeholders.index(value) for value in values]


def plain_exchange(graph: fx.Graph) -> fx.Node | None:
    """A forward whose runs exchange values with other replicas."""
    return next((node for node in calls_to(graph, *OPAQUE) if node.kwargs.get("exchanges")), None)


def exchanges_as_plain_pytorch(program: Program) -> bool:
    graphs = (*program.graphs(), *(region.graph_module.graph for region in program.regions.values()))
    return any(plain_exchange(graph) is not None for graph in graphs)
