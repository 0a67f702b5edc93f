"""Exchanges between replicas in forward and backward that run as plain PyTorch."""

from __future__ import annotations

from torch import fx

from mirrorc.custom_ops.eager_calls import OPAQUE
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program


def plain_exchange(graph: fx.Graph) -> fx.Node | None:
    """A forward whose runs exchange values with other replicas."""
    return next((node for node in calls_to(graph, *OPAQUE) if node.kwargs.get("exchanges")), None)


def exchanges_as_plain_pytorch(program: Program) -> bool:
    graphs = (*program.graphs(), *(region.graph_module.graph for region in program.regions.values()))
    return any(plain_exchange(graph) is not None for graph in graphs)
