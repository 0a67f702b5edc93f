"""The block of `step.join()`, around loops that end at different times; here with calls that are only counted."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from tiny_programs import sgd_step

import mirrorc
from mirrorc.capture.call.call_arguments import flatten_call, without_examples
from mirrorc.coordination.uneven_inputs import JoinedStep, until_all_have_left
from mirrorc.runtime.workers.protocol.header import Agreement
from mirrorc.user.optimizer_groups import OptimizerGroups


class CountedCalls:
    cluster: Any = None

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
        self.optimizers = OptimizerGroups([self.optimizer])
        self.is_in_block = self.has_left = False
        self.errors: list[BaseException] = []

    def enter_block(self, before_call: Callable[[], object]) -> None:
        self.is_in_block = True

    def leave_loop(self) -> None:
        self.has_left = True

    def exit_block(self) -> None:
        self.is_in_block = self.has_left = False

    def take_turn(self, number: int) -> Agreement:
        raise AssertionError("a block of one step takes no turns")

    def abandon(self, error: BaseException) -> None:
        self.errors.append(error)


def block(
    calls: CountedCalls, take_part: Callable[[], Any], *, is_closed: bool = False
) -> AbstractContextManager[None]:
    return until_all_have_left([JoinedStep(calls, take_part, lambda call: call(), lambda: is_closed)])


def test_a_worker_takes_part_until_all_have_left_and_keeps_its_hyperparameters() -> None:
    calls = CountedCalls()
    optimizer = calls.optimizer
    rates = [0.4, 0.3]

    def take_part() -> bool:
        assert calls.has_left
        optimizer.param_groups[0]["lr"] = rates.pop()
        return bool(rates)

    with block(calls, take_part):
        assert calls.is_in_block and not calls.has_left
    assert not rates and optimizer.param_groups[0]["lr"] == 0.5
    assert not calls.is_in_block and not calls.has_left


def test_an_error_in_the_block_is_told_to_the_others() -> None:
    calls = CountedCalls()
    with pytest.raises(OSError, match="gone"), block(calls, pytest.fail):
        raise OSError("the data is gone")
    assert [str(error) for error in calls.errors] == ["the data is gone"] and not calls.is_in_block


def test_a_block_in_a_block_is_refused() -> None:
    calls = CountedCalls()
    inner = block(calls, lambda: False)
    with block(calls, lambda: False):
        with pytest.raises(mirrorc.ExecutionError, match=r"step.join\(\) was entered inside of step.join\(\)"), inner:
            pass
        assert calls.is_in_block


def test_a_closed_step_takes_part_in_nothing() -> None:
    calls = CountedCalls()
    with block(calls, pytest.fail, is_closed=True):
        pass
    assert not calls.is_in_block


def test_in_a_process_on_its_own_the_block_does_nothing() -> None:
    model = torch.nn.Linear(3, 2)
    compiled = sgd_step(model, 1, loss_fn=torch.nn.MSELoss())
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
