"""Reports of a step speak of the program that has trained most often, and of others on request."""

import gc
import re
import threading

import pytest
import torch
import torch.nn.functional as F
from tiny_programs import sgd_step
from torch import nn

import mirrorc
from mirrorc.compilation import program_cache
from mirrorc.errors import ExecutionError


def step_of(**options: object) -> mirrorc.Step:
    torch.manual_seed(0)
    return sgd_step(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), 2, loss_fn=F.mse_loss, dynamic=False, **options
    )


def train(step: mirrorc.Step, num_examples: int, times: int = 1) -> None:
    for _ in range(times):
        step(torch.ones(num_examples, 4), target=torch.ones(num_examples, 1))


def examples_of(program: mirrorc.Program) -> int:
    found = re.search(r"def cpu_0\(\w+: f32\[(\d+)", str(program))
    assert found is not None
    return 2 * int(found[1])  # the shards of two devices are alike


def test_an_epoch_with_a_short_last_batch_and_an_evaluation() -> None:
    with step_of() as step:
        train(step, 8, 3)
        train(step, 6)
        step.evaluate(torch.ones(10, 4), target=torch.ones(10, 1))
        assert step.program.trains and examples_of(step.program) == 8
        assert [program.trains for program in step.programs] == [True, True, False]
        assert step.explain().num_steps >= 1
        main, short, evaluation = step.programs
        assert main is step.program and examples_of(short) == 6
        assert step.memory().total == step.memory(main).total > step.memory(evaluation).total
        assert "gradients" in str(step.memory())
        with pytest.raises(ExecutionError, match="MC5005: this program evaluates, so no call of it was recorded"):
            step.explain(evaluation)
        assert step.explain(short).num_steps == 1
        explained = str(step.explain())
        del main, short, evaluation
    assert str(step.explain()) == explained and examples_of(step.program) == 8, "also of a step that is closed"


def test_of_two_that_trained_as_often_it_is_the_last_one() -> None:
    with step_of() as step:
        train(step, 8)
        train(step, 6)
        assert examples_of(step.program) == 6
        train(step, 8)
        assert examples_of(step.program) == 8
        train(step, 6, 2)
        train(step, 8, 1)
        assert [examples_of(program) for program in step.programs] == [6, 8]
        assert examples_of(step.program) == 8


def test_before_any_update_it_is_that_of_the_last_call() -> None:
    with step_of() as step:
        with pytest.raises(
            ExecutionError, match=r"MC5005: there is no program yet\n  why:  the first call compiles it"
        ):
            _ = step.program
        assert step.programs == ()
        step.accumulate(torch.ones(4, 4), target=torch.ones(4, 1))
        assert step.program.accumulates
        step.evaluate(torch.ones(4, 4))
        assert not step.program.trains
        prepared = step.prepare(torch.ones(8, 4), target=torch.ones(8, 1))
        assert step.program is prepared
        train(step, 8)
        step.prepare(torch.ones(2, 4), target=torch.ones(2, 1))
        assert examples_of(step.program) == 8, "what has trained comes before what was prepared"


def test_a_failed_step_does_not_count() -> None:
    with step_of(check_finite=True) as step:
        train(step, 8, 2)
        train(step, 6)
        for _ in range(3):
            with pytest.raises(mirrorc.NonFiniteError):
                step(torch.full((6, 4), torch.nan), target=torch.ones(6, 1))
        assert examples_of(step.program) == 8


def test_programs_of_other_steps_are_refused() -> None:
    with step_of() as step, step_of() as other:
        train(other, 4)
        train(step, 4)
        for report in (step.explain, step.memory):
            with pytest.raises(ValueError, match=r"MC5005: the program that was given .*\n  fix:  program=None"):
                report(other.program)


def test_reports_of_other_threads_see_a_whole_list() -> None:
    with step_of() as step:
        train(step, 8)
        stop, errors = threading.Event(), []

        def watch() -> None:
            while not stop.is_set():
                try:
                    assert step.program in step.programs
                except (RuntimeError, KeyError, AssertionError) as error:
                    errors.append(error)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for number in range(60):
                train(step, 8 if number % 2 else 6)
        finally:
            stop.set()
            watcher.join(10)
        assert errors == []


@pytest.mark.slow
def test_programs_that_the_cache_has_dropped_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "MOST_SPECIALIZATIONS", 4)
    with step_of() as step:
        for num_examples in range(2, 10):
            step.prepare(torch.ones(num_examples, 4), target=torch.ones(num_examples, 1))
        gc.collect()
        assert len(step.programs) <= 5
