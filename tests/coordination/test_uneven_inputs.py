"""The block of `step.join()`, around loops that end at different times; here with calls that are only counted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mirrorc
from mirrorc.capture.call.arguments import flatten_call, without_examples
from mirrorc.coordination.uneven_inputs import JoinedStep, until_all_have_left
from mirrorc.user.optimizer_groups import OptimizerGroups


def made() -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    told: list[BaseException] = []
    team = SimpleNamespace(abandon=told.append, told=told)
    joint = SimpleNamespace(before_call=None, has_left=False, team=team, optimizers=OptimizerGroups([optimizer]))
    return joint, optimizer


def block(joint: Any, take_part: Callable[[], Any], *, is_closed: bool = False) -> AbstractContextManager[None]:
    """One around the calls of one step."""
    return until_all_have_left([JoinedStep(joint, take_part, lambda call: call(), lambda: is_closed)])


def test_a_worker_takes_part_until_all_have_left_and_keeps_its_hyperparameters() -> None:
    joint, optimizer = made()
    rates = [0.4, 0.3]

    def take_part() -> bool:
        assert joint.has_left
        optimizer.param_groups[0]["lr"] = rates.pop()
        return bool(rates)

    with block(joint, take_part):
        assert joint.before_call is not None and not joint.has_left
    assert not rates and optimizer.param_groups[0]["lr"] == 0.5
    assert joint.before_call is None and not joint.has_left


def test_an_error_in_the_block_is_told_to_the_others() -> None:
    joint, _ = made()
    with pytest.raises(OSError, match="gone"), block(joint, pytest.fail):
        raise OSError("the data is gone")
    assert [str(error) for error in joint.team.told] == ["the data is gone"] and joint.before_call is None


def test_a_block_in_a_block_is_refused() -> None:
    joint, _ = made()
    inner = block(joint, lambda: False)
    with block(joint, lambda: False):
        with pytest.raises(mirrorc.ExecutionError, match=r"step.join\(\) was entered inside of step.join\(\)"), inner:
            pass
        assert joint.before_call is not None


def test_a_closed_step_takes_part_in_nothing() -> None:
    joint, _ = made()
    with block(joint, pytest.fail, is_closed=True):
        pass
    assert joint.before_call is None


def test_in_a_process_on_its_own_the_block_does_nothing() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = mirrorc.compile(model, 1, optimizer=optimizer, loss_fn=torch.nn.MSELoss(), backend="eager")
    with compiled as step, step.join(), step.join():
        loss = step(torch.ones(4, 3), target=torch.zeros(4, 2))
    assert loss > 0


def test_a_call_without_examples_keeps_no_memory_but_what_is_whole() -> None:
    x, mask = torch.ones(6, 4).t(), torch.ones(3)
    call = without_examples(
        flatten_call(["x", "mask", "own"], (x, mirrorc.replicated(mask), mirrorc.PerReplica([x, x])), {})
    )
    first, second, third = call.leaves
    assert first.tensor is not None and first.tensor.shape == (0, 6) and first.tensor.stride() == x.stride()
    assert first.tensor.untyped_storage().nbytes() == 0 and second.tensor is mask
    assert [own.shape for own in third.per_replica] == [(0, 6), (0, 6)]
