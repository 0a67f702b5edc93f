"""Finds which values of forward backward computes again, as the checkpoints of their operators say, and what forward keeps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Sequence, Set
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.aliases import viewed
from mirrorc.ir import ops
from mirrorc.ir.checkpoints import Checkpoint
from mirrorc.ir.nodes import is_compute
from mirrorc.torch_internals import num_bytes_now, storage_bytes_now

CheckpointOf = Callable[[fx.Node], Checkpoint | None]
"""Tells the checkpoint of an operator; None if it is in none."""


def recomputed_values(
    forward: Iterable[fx.Node], backward: Container[fx.Node], first: fx.Node, checkpoint_of: CheckpointOf
) -> set[fx.Node]:
    """The values that backward computes again wherever it needs them.

    Args:
        forward, backward: the nodes of a graph.
        first: that of backward which comes first: what it reads, forward has just made.
        checkpoint_of: says it for each node of the graph.
    """
    return {node for node in forward if _is_recomputed(node, backward, first, checkpoint_of)}


def _is_recomputed(node: fx.Node, backward: Container[fx.Node], first: fx.Node, checkpoint_of: CheckpointOf) -> bool:
    own = checkpoint_of(node)
    if own is None or own.keeps or not (is_compute(node) or node.target is operator.getitem) or first in node.users:
        return False
    for user in node.users:
        if user in backward:
            if is_given_by_forward(user, node):
                return False
            continue
        other = checkpoint_of(user)
        if other is None or other.number != own.number:
            return False
    return True


def is_given_by_forward(output: fx.Node, node: fx.Node) -> bool:
    """Whether the output of a graph has the node as its loss, or as a buffer's new value."""
    found: Any = output.args[0] if output.op == "output" else {}
    return bool(found) and (found["loss"] is node or node in found["writes"].values())


def needed_again(user: fx.Node, again: Set[fx.Node], copies: Container[fx.Node]) -> set[fx.Node]:
    """The values to be computed again for a user: those that it takes, and what those are made of that have no copy yet."""
    found: set[fx.Node] = set()
    pending = [user]
    while pending:
        new = [source for source in pending.pop().all_input_nodes if source in again and source not in found]
        found.update(new)
        pending += [node for node in new if node not in copies]
    return found


def kept_values(nodes: Sequence[fx.Node], backward: Container[fx.Node]) -> list[fx.Node]:
    """What forward computes and backward reads; values that share memory count as one, that in whose memory they lie."""
    kept: dict[fx.Node, None] = {}
    for node in nodes:
        if node not in backward and node.op == "call_function" and any(user in backward for user in node.users):
            kept[owner_of(node)] = None
    return [node for node in kept if node.op == "call_function" and node.target is not ops.read]


def owner_of(node: fx.Node) -> fx.Node:
    """The value in whose memory another one lies."""
    while is_compute(node) and (source := viewed(node)) is not None:
        node = source
    return node


def num_bytes_of(node: fx.Node) -> int:
    """The bytes of a node's value; 0 if it is no tensor.

    A scalar may be a token for memory that an operator keeps, as of `recurrent`: it has its bytes.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return storage_bytes_now(value)
    return num_bytes_now(value)
