"""The beginning of backward in a captured graph."""

from __future__ import annotations

from torch import fx

from mirrorc.ir.program import ArgumentKind, Program, placeholders_of


def first_of_backward(program: Program, graph: fx.Graph) -> fx.Node | None:
    """The first node that uses the gradient of the loss or of an output; None in an evaluation."""
    kinds = (ArgumentKind.LOSS_WEIGHT, ArgumentKind.TANGENT) if program.trains else ()
    tangents = [node for kind in kinds for node in placeholders_of(graph, program.arguments, kind)]
    users = {user for tangent in tangents for user in tangent.users}
    return next((node for node in graph.nodes if node in users), None) if users else None
