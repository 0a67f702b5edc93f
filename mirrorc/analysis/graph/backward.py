"""The beginning of the backward in a captured graph."""

from __future__ import annotations

from torch import fx

from mirrorc.ir.program import ArgumentKind, Program, placeholders_of


def first_of_backward(program: Program, graph: fx.Graph) -> fx.Node | None:
    """The first node that uses the loss's gradient; None in an evaluation."""
    tangents = placeholders_of(graph, program.arguments, ArgumentKind.LOSS_WEIGHT)
    users = {user for tangent in tangents for user in tangent.users}
    return next((node for node in graph.nodes if node in users), None) if users else None
