"""Cuts of a captured graph: where backward begins, at buckets and at the model's collectives."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from mirrorc.analysis.graph.aliases import viewed
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, reached
from mirrorc.ir.program import ArgumentKind, Program, placeholders_of
from mirrorc.torch_internals import num_bytes_now

_MIN_GAIN = 2  # the value has at least so many times the products' bytes


def moved_before_cuts(piece_of: Mapping[fx.Node, int], min_bytes: int) -> dict[fx.Node, int]:
    """Nodes to move before a cut, and their new pieces. Otherwise a large value would cross the cut for much smaller
    results.

    Args:
        piece_of: in the order of the graph. Piece 0, forward, does not change.
        min_bytes: smaller values may cross cuts.
    """
    pieces = dict(piece_of)
    moved: dict[fx.Node, int] = {}
    for value, piece in piece_of.items():
        if piece == 0 or value in moved or value.target is operator.getitem or _num_bytes(value) < min_bytes:
            continue
        readers = _readers_behind(value, pieces)
        products = [node for node in readers if viewed(node) is None]
        is_smaller = _MIN_GAIN * sum(_num_bytes(node) for node in products) <= _num_bytes(value)
        needed = _needed(readers, piece, pieces) if readers and is_smaller else None
        new_pieces = dict.fromkeys(needed or (), piece)
        moved.update(new_pieces)
        pieces.update(new_pieces)
    return moved


def _readers_behind(value: fx.Node, piece_of: Mapping[fx.Node, int]) -> set[fx.Node]:
    def readers(node: fx.Node) -> list[fx.Node]:
        is_read = node is value or viewed(node) is not None
        return [user for user in node.users if piece_of.get(user) != piece_of[value]] if is_read else []

    return set(reached([value], readers)) - {value}


def _needed(readers: set[fx.Node], piece: int, piece_of: Mapping[fx.Node, int]) -> set[fx.Node] | None:
    needed = set(readers)
    pending = list(readers)
    for node in pending:
        if node not in piece_of or not isinstance(node.meta.get("val"), torch.Tensor):
            return None  # the output, or an operator of several results
        for source in node.all_input_nodes:
            if source in needed or piece_of.get(source, 0) <= piece:  # arguments are in no piece
                continue
            if viewed(source) is None:
                return None
            needed.add(source)
            pending.append(source)
    return needed


def _num_bytes(node: fx.Node) -> int:
    return num_bytes_now(node.meta.get("val"))


@dataclass(frozen=True)
class Cut:
    """A graph's operators, cut into pieces of forward and of backward. Pieces may be empty.

    Attributes:
        meetings: the model's collectives, by the index of the piece before them; forward's pieces come first.
    """

    forward: Sequence[Sequence[fx.Node]]
    backward: Sequence[Sequence[fx.Node]] = ()
    meetings: Mapping[int, Sequence[fx.Node]] = field(default_factory=dict)


def cut_at_meetings(graph: fx.Graph, forward: Sequence[fx.Node], backward: Sequence[Sequence[fx.Node]]) -> Cut:
    """A `getitem` stays with its operator."""
    meetings = list(calls_to(graph, *ops.MEETINGS))
    if not meetings:
        return Cut([forward], backward)
    position = {node: i for i, node in enumerate(graph.nodes)}
    places = [position[node] for node in meetings]
    # by the number of meetings before them, and by their piece
    segments: dict[tuple[int, int], list[fx.Node]] = {(0, 0): []}
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


def first_of_backward(program: Program, graph: fx.Graph) -> fx.Node | None:
    """The first node that uses the gradient of the loss or of an output; None in an evaluation."""
    kinds = (ArgumentKind.LOSS_WEIGHT, ArgumentKind.TANGENT) if program.trains else ()
    tangents = [node for kind in kinds for node in placeholders_of(graph, program.arguments, kind)]
    users = {user for tangent in tangents for user in tangent.users}
    return next((node for node in graph.nodes if node in users), None) if users else None
