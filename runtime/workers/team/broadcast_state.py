"""Broadcasts a worker's state to all workers."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch

from mirrorc.messages.problem import problem
from mirrorc.runtime.workers.team.team import Team


def take_over_values(
    team: Team,
    tensors: Mapping[str, torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler | None,
    source: int,
) -> None:
    with torch.no_grad():
        for tensor in tensors.values():
            sent = tensor.detach().clone(memory_format=torch.contiguous_format)
            team.control.broadcast(sent, source)
            if team.cluster.rank != source:
                tensor.copy_(sent)
    holders: list[Any] = [*optimizers, *([scaler] if scaler is not None else [])]
    for holder in holders:
        state = _copied(team, holder.state_dict() if team.cluster.rank == source else None, source)
        if team.cluster.rank != source:
            holder.load_state_dict(state)
            if isinstance(holder, torch.optim.Optimizer):
                _take_over_dtypes(holder, state["state"])


def _take_over_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[Any, Any]) -> None:
    """Restores dtypes, because ``load_state_dict`` casts entries such as NAdam's mu_product."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, entries in saved.items():
        local = optimizer.state.get(parameters[number]) if isinstance(number, int) else None
        if not isinstance(local, dict) or not isinstance(entries, Mapping):
            continue  # an optimizer with a load_state_dict of its own
        for key, value in entries.items():
            loaded = local.get(key)
            if isinstance(loaded, torch.Tensor) and isinstance(value, torch.Tensor) and loaded.dtype != value.dtype:
                local[key] = value.to(loaded.device)


def take_over_hyperparameters(
    team: Team, groups: Sequence[dict[str, Any]], scaler: torch.amp.GradScaler | None, source: int, *, has_left: bool
) -> None:
    """Broadcasts hyperparameters of optimizers and scaler to workers that have left their loops."""
    local = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    scale = scaler.state_dict() if scaler is not None else {}
    hyperparameters, scale = _copied(team, (local, scale) if team.cluster.rank == source else None, source)
    if has_left:
        for group, values in zip(groups, hyperparameters, strict=True):
            group.update(values)
        if scaler is not None:
            scaler.load_state_dict(scale)


_NOT_SAVED = (pickle.PicklingError, AttributeError, TypeError, RuntimeError)  # also NotImplementedError, RecursionError


@contextmanager
def stream_of_chief(team: Team) -> Iterator[None]:
    """A context in which torch's default generator has the chief's state, and afterwards its own again."""
    local_state = torch.get_rng_state()
    chiefs = local_state.clone()
    team.control.broadcast(chiefs)
    if team.cluster.is_chief:
        yield
        return
    torch.set_rng_state(chiefs)
    try:
        yield
    finally:
        torch.set_rng_state(local_state)


def _unsaved(state: Any, around: Set[int] = frozenset()) -> str:
    if id(state) in around or isinstance(state, torch.Tensor):
        return ""
    if isinstance(state, Mapping | list | tuple):
        for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            if path := _unsaved(value, around | {id(state)}):
                return f"[{key!r}]{path}" if path.startswith("[") else f"[{key!r}], {path}"
        return ""
    try:
        torch.save(state, io.BytesIO())
    except _NOT_SAVED:
        return f"a {type(state).__name__},"
    return ""


def _copied(team: Team, state: Any, source: int) -> Any:
    """The state of worker ``source``; other workers pass None."""
    saved = io.BytesIO()
    try:
        torch.save(state, saved)
    except _NOT_SAVED as error:
        raise problem(
            ValueError,
            f"MC6403: what worker {source} has in its optimizers cannot be sent to the other workers",
            f"{_unsaved(state) or 'part of it'} cannot be saved: {error}",
            ("define functions and classes at the top of a module", "keep such an object out of the optimizer"),
        ) from error
    text = torch.frombuffer(saved.getbuffer(), dtype=torch.uint8)
    size = torch.tensor(text.numel())
    team.control.broadcast(size, source)
    received = text.clone() if team.cluster.rank == source else torch.empty(int(size), dtype=torch.uint8)
    team.control.broadcast(received, source)
    # weights_only=False is safe: a worker of this program has just saved the state
    # on the CPU: another worker's GPU may have another number
    return torch.load(io.BytesIO(received.numpy().tobytes()), map_location="cpu", weights_only=False)
