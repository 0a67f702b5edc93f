"""Distributes residuals of an earlier run among the workers of this run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mirrorc.messages.problem import problem

_KEYS = ("num_workers", "rank", "unsent")


def unsent_of_worker(
    states: Sequence[Mapping[str, Any]], rank: int, num_workers: int, parameters: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Sums the residuals of each earlier rank r with ``r % num_workers == rank``.

    Args:
        states: the entry ``worker`` of `mirrorc.Step.state_dict`, from each worker of the earlier run, in any order.

    Returns:
        This worker's residuals, and the payloads' state, which is equal on all workers; both by variable.

    Raises:
        TypeError: a state is not such an entry.
        ValueError: ``states`` lack a worker of the run, or belong to another model.
    """
    of_ranks, first = _checked(states, parameters)
    unsent: dict[str, torch.Tensor] = {}
    for other in range(rank, len(of_ranks), num_workers):
        for name, value in of_ranks[other].items():
            unsent[name] = unsent[name] + value if name in unsent else value.detach().clone()
    return unsent, {name: value.detach().clone() for name, value in first.get("state", {}).items()}


def _checked(
    states: Sequence[Mapping[str, Any]], parameters: Mapping[str, torch.Tensor]
) -> tuple[dict[int, Mapping[str, torch.Tensor]], Mapping[str, Any]]:
    for state in states:
        keys = set(state) if isinstance(state, Mapping) else set()
        if not keys.issuperset(_KEYS):  # states of earlier versions have additional keys
            raise TypeError(
                f"MC7002: each of the states is a dict with {', '.join(_KEYS)}, as step.state_dict() has it under 'worker'"
            )
    ranks, numbers = [state["rank"] for state in states], {state["num_workers"] for state in states}
    if len(numbers) != 1 or sorted(ranks) != list(range(*numbers)):
        raise problem(
            ValueError,
            "MC7006: the states are not those of all workers of one run, each once",
            f"they are of the ranks {', '.join(map(str, ranks)) or 'of nobody'} of runs with "
            f"{', '.join(map(str, sorted(numbers))) or 'no'} workers, so some gradients would be lost or added twice",
            "give a list with what step.state_dict() gave on every worker of the run",
        )
    for state in states:
        for name, value in state["unsent"].items():
            parameter = parameters.get(name)
            if (
                parameter is None
                or not isinstance(value, torch.Tensor)
                or (parameter.shape, parameter.dtype) != (value.shape, value.dtype)
            ):
                has = f"{list(parameter.shape)} of {parameter.dtype}" if parameter is not None else "no such parameter"
                raise problem(
                    ValueError,
                    f"MC7006: worker {state['rank']} had not sent all of the gradient of {name!r}, and its rest does not fit",
                    f"it is no tensor like this model's parameter ({has})",
                    "give states of a run of this model",
                )
        for name, value in state.get("state", {}).items():
            if name not in parameters or not isinstance(value, torch.Tensor):
                raise problem(
                    ValueError,
                    f"MC7006: worker {state['rank']} had a state of the payload of {name!r}, which does not fit",
                    "it is no tensor for a parameter of this model",
                    "give states of a run of this model",
                )
    first = next(state for state in states if state["rank"] == 0)
    return {state["rank"]: state["unsent"] for state in states}, first
