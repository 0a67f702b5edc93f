"""Values that backward recomputes for checkpoints, and saved activations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Sequence, Set
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.aliases import viewed
from mirrorc.ir import ops
from mirrorc.ir.nodes import Checkpoint, is_compute, reached
from mirrorc.torch_internals import num_bytes_now, storage_bytes_now

CheckpointOf = Callable[[fx.Node], Checkpoint | None]
"""The checkpoint of an operator; None outside of checkpoints."""


def recomputed_values(
    forward: Iterable[fx.Node], backward: Container[fx.Node], first: fx.Node, checkpoint_of: CheckpointOf
) -> set[fx.Node]:
    """The operands of ``first``, the first node of backward, are still in memory."""
    return {node for node in forward if _is_recomputed(node, backward, first, checkpoint_of)}


def _is_recomputed(node: fx.Node, backward: Container[fx.Node], first: fx.Node, checkpoint_of: CheckpointOf) -> bool:
    checkpoint = checkpoint_of(node)
    if (
        checkpoint is None
        or checkpoint.keeps
        or not (is_compute(node) or node.target is operator.getitem)
        or first in node.users
    ):
        return False
    for user in node.users:
        if user in backward:
            if is_forward_output(user, node):
                return False
            continue
        other = checkpoint_of(user)
        if other is None or other.number != checkpoint.number:
            return False
    return True


def is_forward_output(output: fx.Node, node: fx.Node) -> bool:
    results: Any = output.args[0] if output.op == "output" else {}
    return bool(results) and (results["loss"] is node or node in results["writes"].values())


def needed_again(user: fx.Node, again: Set[fx.Node], copies: Container[fx.Node]) -> set[fx.Node]:
    """Values of ``again`` that a user needs, directly or through values of ``again`` without a copy."""

    def onward(node: fx.Node) -> list[fx.Node]:
        return [source for source in node.all_input_nodes if source in again] if node not in copies else []

    return set(reached([user], onward)) - {user}


def saved_values(nodes: Sequence[fx.Node], backward: Container[fx.Node]) -> list[fx.Node]:
    """Values of forward that backward reads; for a view, the owner of its memory."""
    owners: dict[fx.Node, None] = {}
    for node in nodes:
        if node not in backward and node.op == "call_function" and any(user in backward for user in node.users):
            owners[owner_of(node)] = None
    return [node for node in owners if node.op == "call_function" and node.target is not ops.read]


def owner_of(node: fx.Node) -> fx.Node:
    while is_compute(node) and (source := viewed(node)) is not None:
        node = source
    return node


def num_bytes_of(node: fx.Node) -> int:
    """0 for other values than tensors.

    A scalar may be a token for memory held by its operator, as by `recurrent`. The bytes of that memory then count.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return storage_bytes_now(value)
    return num_bytes_now(value)
