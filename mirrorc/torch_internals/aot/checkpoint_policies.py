"""Operators that `torch.utils.checkpoint` recomputes in backward."""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_KEPT = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def checkpoint_tag(node: fx.Node) -> tuple[int, bool] | None:
    """The number of an operator's checkpoint, and True if its result is saved; None outside of checkpoints.

    Raises:
        ValueError: the policy neither saves nor recomputes the result.
    """
    policy = node.meta.get("recompute")
    if policy is None:
        return None
    if policy not in (*_RECOMPUTED, *_KEPT):
        raise ValueError(str(policy))
    return int(node.meta.get("ac_graph_id", 0)), policy in _KEPT
