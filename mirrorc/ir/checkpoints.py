"""Activation checkpoints: forward operators that backward runs again."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """A call of `torch.utils.checkpoint`, noted on an operator inside it. ``keeps``: the policy saves the operator's result."""

    number: int
    keeps: bool = False


def checkpoint_of(node: fx.Node) -> Checkpoint | None:
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    checkpoint: Checkpoint | None = node.meta.get(CHECKPOINT)
    return checkpoint
