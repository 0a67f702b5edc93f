"""Takes over the values of one worker, such as the chief's, with which training over several workers starts."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mirrorc.runtime.workers.team import Team


def take_over_values(
    team: Team,
    tensors: Mapping[str, torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None,
    source: int,
) -> None:
    """Gives parameters, buffers, the optimizers and the scaler the values that they have on one worker.

    Args:
        team: the workers.
        tensors: parameters and buffers, by name; the same ones on all workers.
        optimizers, scaler: the user's.
        source: the rank of the worker whose values they are.

    Raises:
        LostConnectionError: a worker has failed, or the connection broke.
    """
    with torch.no_grad():
        for tensor in tensors.values():
            sent = tensor.detach().clone(memory_format=torch.contiguous_format)
            team.words.copy(sent, source)
            if team.cluster.rank != source:
                tensor.copy_(sent)
    holders: list[Any] = [*optimizers, *([scaler] if scaler is not None else [])]
    for holder in holders:
        state = _copied(team, holder.state_dict() if team.cluster.rank == source else None, source)
        if team.cluster.rank != source:
            holder.load_state_dict(state)


def take_over_hyperparameters(
    team: Team, groups: Sequence[dict[str, Any]], scaler: torch.amp.GradScaler | None, source: int, *, has_left: bool
) -> None:
    """Gives the optimizers' groups and the scaler of workers that have left the hyperparameters of one that has not.

    Args:
        team: the workers.
        groups: of the user's optimizers; the same ones on all workers.
        scaler: the user's.
        source: the rank of the worker that tells its own.
        has_left: whether this worker takes them over.

    Raises:
        LostConnectionError: a worker has failed, or the connection broke.
    """
    own = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    scale = scaler.state_dict() if scaler is not None else {}
    told, scale = _copied(team, (own, scale) if team.cluster.rank == source else None, source)
    if has_left:
        for group, values in zip(groups, told, strict=True):
            group.update(values)
        if scaler is not None:
            scaler.load_state_dict(scale)


@contextmanager
def stream_of_chief(team: Team) -> Iterator[None]:
    """A block in which torch's default generator gives what the chief's gives; behind it, other workers have their own again.

    Raises:
        LostConnectionError: a worker has failed, or the connection broke.
    """
    own = torch.get_rng_state()
    chiefs = own.clone()
    team.words.copy(chiefs)
    if team.cluster.is_chief:
        yield
        return
    torch.set_rng_state(chiefs)
    try:
        yield
    finally:
        torch.set_rng_state(own)


def _copied(team: Team, state: Any, source: int) -> Any:
    """What the worker ``source`` gives; another one gives None."""
    saved = io.BytesIO()
    torch.save(state, saved)
    text = torch.frombuffer(saved.getbuffer(), dtype=torch.uint8)
    size = torch.tensor(text.numel())
    team.words.copy(size, source)
    received = text.clone() if team.cluster.rank == source else torch.empty(int(size), dtype=torch.uint8)
    team.words.copy(received, source)
    # a worker of this very program has saved it a moment ago
    # and each may have a GPU of another number
    return torch.load(io.BytesIO(received.numpy().tobytes()), map_location="cpu", weights_only=False)
