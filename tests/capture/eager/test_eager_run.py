"""The gradients of a run are there as backward makes them, one after the other."""

import gc
import threading
import weakref
from collections.abc import Callable, Set
from functools import partial

import pytest
import torch
from torch import nn

from mirrorc.capture.eager.carried_state import CarriedState
from mirrorc.capture.eager.eager_run import Run, RunGradients
from mirrorc.capture.eager.module_copies import ModuleCopy
from mirrorc.custom_ops.eager_calls import UsedParameters
from mirrorc.errors import ExecutionError

Loss = Callable[..., torch.Tensor]


def run_of(loss: Loss, number: int = 3, unreached: Set[int] = frozenset()) -> Run:
    parameters = [nn.Parameter(torch.full((2,), float(place + 1))) for place in range(number)]
    run = Run(ModuleCopy(nn.Identity()), parameters, [], [])
    run.loss, run.unreached = loss(*parameters), unreached
    return run


def gradients_of(run: Run, late: Set[int] = frozenset()) -> RunGradients:
    return RunGradients(run, lambda: run.loss.backward(), late, "Net", CarriedState("Net"), UsedParameters())


def chained(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Backward makes the gradient of the last one first."""
    return ((a.sin() * b).sin() * c).sum()


def seen_while(gradients: RunGradients, number: int = 3) -> list[list[int]]:
    found: list[list[int]] = []
    gradients.run(lambda: found.append([place for place in range(number) if gradients.has(place)]))
    return found


def test_gradients_are_there_one_after_the_other() -> None:
    gradients = gradients_of(run_of(chained))
    assert not any(map(gradients.has, range(3)))
    found = seen_while(gradients)
    assert found == [[2], [1, 2], [0, 1, 2]] and gradients.arrived == [2, 1, 0]
    assert gradients.has_ended


def test_a_parameter_that_is_used_twice_has_its_gradient_after_the_last_part() -> None:
    def loss(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return chained(c * a, b, c)

    gradients = gradients_of(run_of(loss))
    assert seen_while(gradients)[-1] == [0, 1, 2] and gradients.arrived.count(2) == 1
    assert gradients.arrived.index(2) > gradients.arrived.index(1)


def test_one_that_forward_does_not_reach_is_known_to_have_none_at_once() -> None:
    gradients = gradients_of(run_of(lambda a, b, c: (a * c).sum(), unreached={1}))
    assert not gradients.has(1), "who takes it would have backward run"
    assert [1 in places and len(places) == 2 + number for number, places in enumerate(seen_while(gradients))] == [
        True,
        True,
    ]
    assert gradients.take(1) is None and gradients.take(0) is not None


class WithinBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, factors: list[torch.Tensor]) -> torch.Tensor:
        ctx.factors = factors  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        for factor in ctx.factors:  # type: ignore[attr-defined]
            with torch.enable_grad():
                factor.sum().backward()
        return gradient, None


def of_two_parts(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return (WithinBackward.apply(a * b, [c, c]) * a).sum()  # type: ignore[no-untyped-call]


def test_one_that_comes_in_parts_is_not_there_before_the_end() -> None:
    gradients = gradients_of(run_of(of_two_parts, unreached={2}), late={2})
    assert not any(2 in places for places in seen_while(gradients))
    assert gradients.arrived.count(2) == 2
    assert torch.equal(gradients.take(2), torch.full((2,), 2.0))  # type: ignore[arg-type]


def test_one_that_is_added_to_when_it_was_taken_is_refused() -> None:
    gradients = gradients_of(run_of(of_two_parts), late=set())

    def take() -> None:
        if gradients.has(2):
            gradients.take(2)

    with pytest.raises(
        ExecutionError,
        match=r"MC2602: a gradient of shape \[2\] changed after it had been sent\n  why:  something in the backward of Net",
    ):
        gradients.run(take)
    assert not gradients.has_ended


def test_what_is_raised_within_ends_backward() -> None:
    gradients, error = gradients_of(run_of(chained)), ValueError("enough")

    def fail() -> None:
        raise error

    with pytest.raises(ValueError, match="enough") as raised:
        gradients.run(fail)
    assert raised.value is error and gradients.arrived == [2] and not gradients.has_ended


def test_a_gradient_that_comes_in_another_thread_is_noted_and_nothing_is_done_there() -> None:
    run, called = run_of(chained), list[int]()

    def backward() -> None:
        thread = threading.Thread(target=run.loss.backward)
        thread.start()
        thread.join()

    gradients = RunGradients(run, backward, set(), "Net", CarriedState("Net"), UsedParameters())
    gradients.run(lambda: called.append(1))
    assert (gradients.arrived, called) == ([2, 1, 0], [])


def test_who_takes_a_gradient_that_nobody_has_asked_for_has_backward_run() -> None:
    gradients = gradients_of(run_of(chained))
    assert gradients.take(0) is not None and gradients.has_ended
    with pytest.raises(AssertionError, match="one backward"):
        gradients.run()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_kept_of_a_run_that_has_ended(fails: bool) -> None:
    def backward(run: Run) -> None:
        run.loss.backward()
        if fails:
            raise ValueError

    gc.disable()
    try:
        run = run_of(chained)
        known = weakref.ref(run.parameters[0])
        gradients = RunGradients(run, partial(backward, run), set(), "Net", CarriedState("Net"), UsedParameters())
        try:
            gradients.run()
        except ValueError:
            assert fails
        del run, gradients
        assert known() is None
    finally:
        gc.enable()
