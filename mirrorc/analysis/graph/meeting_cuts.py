"""Cuts a captured graph where replicas meet."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to


@dataclass(frozen=True)
class Cut:
    """The operators of a graph, cut into pieces of forward and of backward; pieces may be empty.

    Attributes:
        meetings: those behind each piece, by its place among all of them.
    """

    forward: Sequence[Sequence[fx.Node]]
    backward: Sequence[Sequence[fx.Node]] = ()
    meetings: Mapping[int, Sequence[fx.Node]] = field(default_factory=dict)


def cut_at_meetings(graph: fx.Graph, forward: Sequence[fx.Node], backward: Sequence[Sequence[fx.Node]]) -> Cut:
    """Cuts the pieces further, where replicas meet. Parts of results stay with their source."""
    meetings = list(calls_to(graph, *ops.MEETINGS))
    if not meetings:
        return Cut([forward], backward)
    position = {node: i for i, node in enumerate(graph.nodes)}
    places = [position[node] for node in meetings]
    segments: dict[tuple[int, int], list[fx.Node]] = {(0, 0): []}  # by how many meetings come before, and by the piece
    for piece, nodes in enumerate((forward, *backward)):
        for node in nodes:
            before = bisect.bisect(places, position[source_of_part(node)])
            segments.setdefault((before, piece), []).append(node)
    order = sorted(segments)
    behind: dict[int, list[fx.Node]] = {}
    for number, meeting in enumerate(meetings):
        behind.setdefault(max(i for i, (before, _) in enumerate(order) if before <= number), []).append(meeting)
    pieces = [segments[key] for key in order]
    num_forward = sum(piece == 0 for _, piece in order)
    return Cut(pieces[:num_forward], pieces[num_forward:], behind)


def source_of_part(node: fx.Node) -> fx.Node:
    while node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node
