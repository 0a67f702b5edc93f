"""Takes over the chief's values, with which training over several workers starts."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mirrorc.runtime.workers.team import Team


def take_over_from_chief(
    team: Team,
    tensors: Mapping[str, torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None,
) -> None:
    """Gives parameters, buffers, the optimizers and the scaler the values that they have on worker 0.

    Args:
        team: the workers.
        tensors: parameters and buffers, by name; the same ones on all workers.
        optimizers, scaler: the user's.

    Raises:
        LostConnectionError: a worker has failed, or the connection broke.
    """
    with torch.no_grad():
        for tensor in tensors.values():
            sent = tensor.detach().clone(memory_format=torch.contiguous_format)
            team.copy(sent)
            if not team.cluster.is_chief:
                tensor.copy_(sent)
    holders: list[Any] = [*optimizers, *([scaler] if scaler is not None else [])]
    for holder in holders:
        state = _copied(team, holder.state_dict() if team.cluster.is_chief else None)
        if not team.cluster.is_chief:
            holder.load_state_dict(state)


def _copied(team: Team, state: Any) -> Any:
    """What the chief gives; another worker gives None."""
    saved = io.BytesIO()
    torch.save(state, saved)
    text = torch.frombuffer(saved.getbuffer(), dtype=torch.uint8)
    size = torch.tensor(text.numel())
    team.copy(size)
    received = text.clone() if team.cluster.is_chief else torch.empty(int(size), dtype=torch.uint8)
    team.copy(received)
    # a worker of this very program has saved it a moment ago
    return torch.load(io.BytesIO(received.numpy().tobytes()), weights_only=False)
