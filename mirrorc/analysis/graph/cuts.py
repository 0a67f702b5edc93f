"""Moves operators before a cut of the graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from mirrorc.analysis.graph.aliases import viewed
from mirrorc.torch_internals import num_bytes_now

_MIN_GAIN = 2  # the value has at least so many times the products' bytes


def moved_before_cuts(piece_of: Mapping[fx.Node, int], min_bytes: int) -> dict[fx.Node, int]:
    """The nodes to move before a cut, with their new pieces, so that a large value need not pass it for much smaller
    products.

    Args:
        piece_of: in the order of the graph; piece 0, the forward, is left as it is.
        min_bytes: smaller values may pass a cut.
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
    """Looks through views."""
    readers: set[fx.Node] = set()
    pending = [value]
    for node in pending:
        for user in node.users:
            if piece_of.get(user) != piece_of[value] and user not in readers:
                readers.add(user)
                if viewed(user) is not None:
                    pending.append(user)
    return readers


def _needed(readers: set[fx.Node], piece: int, piece_of: Mapping[fx.Node, int]) -> set[fx.Node] | None:
    """The readers and the views for them; None if they need anything else behind the piece."""
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
