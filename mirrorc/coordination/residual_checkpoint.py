"""Deals out what the workers of an earlier run have not sent of their gradients, to those of this one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_KEYS = ("num_workers", "rank", "unsent")


def unsent_of_worker(
    states: Sequence[Mapping[str, Any]], rank: int, num_workers: int, parameters: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What one worker gets: the sum of what the ranks had that are its own modulo the number of workers, by variable; and the
    state of payloads, by variable, which all had alike.

    Args:
        states: as `mirrorc.Step.unsent_state` gave them on all workers of the earlier run, in any order.
        rank, num_workers: of this worker.
        parameters: of the model, by name.

    Raises:
        TypeError, ValueError: they are no such states, not those of all workers, or of another model.
    """
    of_ranks, first = _checked(states, parameters)
    found: dict[str, torch.Tensor] = {}
    for other in range(rank, len(of_ranks), num_workers):
        for name, value in of_ranks[other].items():
            found[name] = found[name] + value if name in found else value.detach().clone()
    return found, {name: value.detach().clone() for name, value in first.get("state", {}).items()}


def _checked(
    states: Sequence[Mapping[str, Any]], parameters: Mapping[str, torch.Tensor]
) -> tuple[dict[int, Mapping[str, torch.Tensor]], Mapping[str, Any]]:
    """What each rank had, and the state of the first."""
    if isinstance(states, Mapping) or not isinstance(states, Sequence):
        raise TypeError(
            f"states is a {type(states).__name__}: give a list of what step.unsent_state() gave on every worker of one run"
        )
    for state in states:
        keys = set(state) if isinstance(state, Mapping) else set()
        if not keys.issuperset(_KEYS):  # those of earlier versions have other keys besides
            raise TypeError(f"each of the states is a dict with {', '.join(_KEYS)}, as step.unsent_state() gives it")
    ranks, numbers = [state["rank"] for state in states], {state["num_workers"] for state in states}
    if len(numbers) != 1 or sorted(ranks) != list(range(*numbers)):
        raise ValueError(
            f"the states are those of the ranks {', '.join(map(str, ranks)) or 'of nobody'} of runs with "
            f"{', '.join(map(str, sorted(numbers))) or 'no'} workers: give what step.unsent_state() gave on every worker of one "
            "run, once each, or some gradients would be lost or added twice"
        )
    for state in states:
        for name, value in state["unsent"].items():
            own = parameters.get(name)
            if (
                own is None
                or not isinstance(value, torch.Tensor)
                or (own.shape, own.dtype) != (value.shape, value.dtype)
            ):
                has = f"{list(own.shape)} of {own.dtype}" if own is not None else "no such parameter"
                raise ValueError(
                    f"worker {state['rank']} had not sent all of the gradient of {name!r}, which is no tensor like this model's "
                    f"parameter ({has}): give states of a run of this model"
                )
        for name, value in state.get("state", {}).items():
            if name not in parameters or not isinstance(value, torch.Tensor):
                raise ValueError(
                    f"worker {state['rank']} had a state of the payload of {name!r}, which is no tensor for a parameter of this "
                    "model: give states of a run of this model"
                )
    first = next(state for state in states if state["rank"] == 0)
    return {state["rank"]: state["unsent"] for state in states}, first
