"""Activation checkpoints: operators of forward that backward runs again."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

CHECKPOINT = "checkpoint"
"""The key in `node.meta`."""


@dataclass(frozen=True)
class Checkpoint:
    """The call of `torch.utils.checkpoint` around an operator; ``keeps`` if its policy saves the result."""

    number: int
    keeps: bool = False


def checkpoint_of(node: fx.Node) -> Checkpoint | None:
    """The checkpoint around an operator. A part of a result has that of its operator."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    checkpoint: Checkpoint | None = node.meta.get(CHECKPOINT)
    return checkpoint
