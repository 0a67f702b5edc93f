"""The checkpoints of activations that a model has: which operators of forward backward runs again."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

CHECKPOINT = "checkpoint"
"""The key of `node.meta` under which an operator of a captured graph has its `Checkpoint`."""


@dataclass(frozen=True)
class Checkpoint:
    """The call of `torch.utils.checkpoint` in which forward calls an operator.

    Attributes:
        number: tells the checkpoints of a graph apart.
        keeps: whether the checkpoint's policy keeps the operator's result, so that backward does not compute it again.
    """

    number: int
    keeps: bool = False


def checkpoint_of(node: fx.Node) -> Checkpoint | None:
    """The checkpoint of an operator; None outside of all. A part of a result has that of the operator that gives it."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    found: Checkpoint | None = node.meta.get(CHECKPOINT)
    return found
