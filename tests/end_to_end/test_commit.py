"""A step takes place on all replicas or not at all, whatever stops it and whenever, and training goes on afterwards."""

import gc
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from interrupts import Interrupter, fail, interrupt, python_handles_interrupts
from lockstep import Lockstep, Training
from selections import slow
from small_modules import module_of
from torch import nn
from torch.nn import functional as F
from twins import compiled_step

import mirrorc
from mirrorc import ExecutionError
from mirrorc.packing import ByBytes
from mirrorc.runtime.execution import interrupts
from mirrorc.runtime.execution.commit.commit_point import CommitPoint
from mirrorc.runtime.execution.interrupts import InterruptGuard
from mirrorc.runtime.state.optimizers import flat_optimizer

# torch's guards take an error in a function that they call for a change; Ctrl-C is kept meanwhile
WITHIN_GUARDS = tuple(f"{torch.__path__[0]}/{folder}/" for folder in ("_dynamo", "_functorch"))
BATCH = {"x": torch.linspace(-1, 1, 36).reshape(6, 6).sin(), "target": torch.tensor([0, 1, 2, 0, 1, 2])}
ADAMW = partial(torch.optim.AdamW, lr=0.01)
ADADELTA = partial(torch.optim.Adadelta, lr=0.5)
COPIES = {"link": "copy", "disable": ["share-parameters"]}
WAYS: dict[str, tuple[Any, dict[str, Any], bool]] = {  # the optimizer, options, whether the replicas are interleaved
    "threads": (ADAMW, {}, False),
    "one thread": (ADAMW, {}, True),
    "copies": (ADAMW, COPIES, False),
    "an optimizer by itself": (ADADELTA, {}, False),
    "an optimizer by itself, copies": (ADADELTA, COPIES, False),
}


def maker(
    optimizer: Any = ADAMW, **options: Any
) -> Callable[[], tuple[mirrorc.Step, nn.Module, torch.optim.Optimizer]]:
    def make() -> tuple[mirrorc.Step, nn.Module, torch.optim.Optimizer]:
        model = module_of(
            lambda self, x: self.last(self.dropout(self.norm(self.first(x)))),
            first=nn.Linear(6, 8),
            norm=nn.BatchNorm1d(8),
            dropout=nn.Dropout(0.3),
            last=nn.Linear(8, 3),
        )
        own, sizes = optimizer(model.parameters()), {"buckets": ByBytes(1e-4, 1e-4)}
        step = compiled_step(model, F.cross_entropy, optimizer=own, timeout=60, **sizes, **options)
        return step, model, own

    return make


def prefer(training: Training, is_interleaved: bool) -> None:
    trial = training.step._runs.last.trial  # type: ignore[union-attr]
    trial.interleaves, trial.is_decided = is_interleaved, True


def lockstep(way: str) -> Lockstep:
    optimizer, options, is_interleaved = WAYS[way]
    both = Lockstep(maker(optimizer, **options), BATCH)
    both.go_on()
    for training in (both.undisturbed, both.disturbed):
        prefer(training, is_interleaved)
    both.go_on()
    return both


MARKS = {way: [] if way in ("threads", "one thread") else [pytest.mark.slow] for way in WAYS}


@pytest.mark.parametrize(
    ("way", "how", "stride"),
    [
        *(pytest.param(way, interrupt, 113, marks=MARKS[way]) for way in WAYS),
        *(  # where a failure of an update is one of the replicas
            pytest.param(way, fail, 101, marks=MARKS[way]) for way in WAYS if way != "one thread"
        ),
        *(pytest.param(way, interrupt, 1, marks=pytest.mark.exhaustive) for way in WAYS),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_comes_at_any_place_of_the_callers_thread(way: str, how: Any, stride: int) -> None:
    """Between any two calls of Python: the state is that before the step or that after it, bit for bit."""
    interrupter = Interrupter(lambda filename: how is interrupt or not filename.startswith(WITHIN_GUARDS))
    both, counted, outcomes = lockstep(way), list[int](), []
    with python_handles_interrupts(), both.undisturbed.step, both.disturbed.step:
        both.disturb(lambda run: counted.append(interrupter.count(run)))
        for place in range(0, counted[0] - 20, stride):  # later runs may take another turn, and have a few places less
            before = threading.active_count()
            raised, has_trained = both.disturb(lambda run: interrupter.interrupted(run, place, how))  # noqa: B023
            is_cured = how is fail and raised is None and has_trained  # by repeating
            assert is_cured or isinstance(raised, KeyboardInterrupt if how is interrupt else RuntimeError), (
                interrupter.where
            )
            outcomes.append(has_trained)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, interrupter.where
            assert threading.active_count() == before
            both.go_on()
    assert how is fail or {True, False} == set(outcomes), "a step is stopped before its commit and finished after it"


def test_what_comes_while_torch_turns_gradients_off_or_on() -> None:
    interrupter, counted = Interrupter(lambda filename: filename.endswith("autograd/grad_mode.py")), list[int]()
    both = lockstep("one thread")
    with python_handles_interrupts(), both.undisturbed.step, both.disturbed.step:
        both.disturb(lambda run: counted.append(interrupter.count(run)))
        assert counted[0]
        for place in range(counted[0]):
            raised, _ = both.disturb(lambda run: interrupter.interrupted(run, place))  # noqa: B023
            assert isinstance(raised, KeyboardInterrupt)
            both.go_on()


class TooLong(Exception):
    """What a handler of another signal than Ctrl-C raises, as those that limit a test's time do."""


def too_long(number: int, frame: Any) -> None:
    raise TooLong


def alarm(frame: Any) -> None:
    too_long(signal.SIGTERM, frame)


@pytest.mark.parametrize("stride", [293, pytest.param(19, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("way", ["threads", "one thread"])
def test_what_the_handler_of_another_signal_raises(way: str, stride: int) -> None:
    """It is raised as it is. Only replicas that run in the caller's thread may be torn by it, once committed, and it says so."""
    interrupter = Interrupter(lambda filename: not filename.startswith(WITHIN_GUARDS))
    both, counted, outcomes = lockstep(way), list[int](), []
    before = signal.signal(signal.SIGTERM, too_long)
    try:
        both.disturb(lambda run: counted.append(interrupter.count(run)))
        for place in range(0, counted[0] - 20, stride):
            try:
                raised, has_trained = both.disturb(lambda run: interrupter.interrupted(run, place, alarm))  # noqa: B023
            except AssertionError as error:
                assert way == "one thread" and "had begun" in str(error), interrupter.where
                both.close()
                both = lockstep(way)
                outcomes.append(None)
            else:
                assert isinstance(raised, TooLong), (raised, interrupter.where)
                outcomes.append(has_trained)
                both.go_on()
    finally:
        signal.signal(signal.SIGTERM, before)
        both.close()
    assert {True, False} <= set(outcomes)


class Sender(threading.Thread):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def run(self) -> None:
        threading.Event().wait(self._seconds)
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.fast
@pytest.mark.parametrize("way", [way for way in WAYS if way != "an optimizer by itself, copies"])
@pytest.mark.parametrize(
    "count", [pytest.param(25, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.exhaustive)]
)
def test_real_interrupts_at_random_moments(way: str, count: int) -> None:
    gc.collect()  # Python drops what a handler raises while garbage of other tests calls back
    both, chance, outcomes, seconds = lockstep(way), random.Random(0), set(), list[float]()

    def measure(run: Callable[[], Any]) -> None:
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)

    def send(run: Callable[[], Any]) -> None:
        sender = Sender(chance.random() * statistics.median(seconds))
        sender.start()
        try:
            run()
        finally:
            sender.join()

    with python_handles_interrupts(), both.undisturbed.step, both.disturbed.step:
        for _ in range(5):
            both.disturb(measure)
        for i in range(20 * count):  # on a busy machine the first ones may all come late
            raised, has_trained = both.disturb(send)
            assert isinstance(raised, KeyboardInterrupt)
            outcomes.add(has_trained)
            both.go_on()
            if i + 1 >= count and outcomes == {True, False}:
                return
    pytest.fail("they should come before the commit, and after it")


@pytest.mark.fast
@pytest.mark.parametrize(("replica", "options"), [(1, COPIES), *slow((1, {}), (0, COPIES))])
def test_a_first_step_that_cannot_make_the_optimizers_state_is_undone(
    replica: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Lockstep(maker(**options), BATCH)
    update, calls = flat_optimizer.FlatOptimizer.update, []

    def short_of_memory(self: flat_optimizer.FlatOptimizer, gradient: torch.Tensor) -> None:
        if threading.current_thread().name == f"mirrorc cpu:{replica}":
            calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("not enough memory")
        update(self, gradient)

    with both.undisturbed.step, both.disturbed.step:
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(flat_optimizer.FlatOptimizer, "update", short_of_memory)
                calls.clear()
                raised, has_trained = both.disturb()
            assert isinstance(raised, ExecutionError) and "No parameter was changed" in str(raised) and not has_trained
        for _ in range(2):
            both.go_on()


@pytest.mark.parametrize(("replica", "options"), [(1, {}), (0, COPIES), (1, COPIES)])
def test_a_step_that_cannot_make_state_for_momentum_turned_on_later_is_undone(
    replica: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short_of_memory(_: torch.optim.Optimizer) -> None:
        raise RuntimeError("not enough memory")

    both = Lockstep(maker(partial(torch.optim.SGD, lr=0.01), **options), BATCH)
    with both.undisturbed.step, both.disturbed.step:
        for _ in range(2):
            both.go_on()
        for training in (both.undisturbed, both.disturbed):
            training.optimizer.param_groups[0]["momentum"] = 0.9
        flat_optimizers = both.disturbed.step._state.optimizers._state.optimizers
        last = max(key for key in flat_optimizers if key[1] == replica)
        monkeypatch.setattr(flat_optimizers[last], "_step", short_of_memory)
        raised, has_trained = both.disturb()
        assert isinstance(raised, ExecutionError) and "No parameter was changed" in str(raised) and not has_trained
        for _ in range(2):
            both.go_on()


class Careless(torch.optim.Adadelta):
    fails = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.fails:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise RuntimeError("half-way")
        super().step()


TORN = (
    r"half-way\n  at:   test_commit\.py:.*\n  now:  The update had begun\. .*in part, so load a checkpoint\n"
    r"  fix:  mend the optimizer's step\(\)"
)


@pytest.mark.parametrize("options", [{}, COPIES], ids=["shared", "copies"])
def test_an_optimizer_that_fails_half_way_is_said_to_be_torn(options: dict[str, Any]) -> None:
    step, model, optimizer = maker(Careless, **options)()
    with step:
        step(**BATCH)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.fails = True  # type: ignore[attr-defined]
        with pytest.raises(ExecutionError, match=TORN):
            step(**BATCH)
        assert not torch.equal(before[0], next(model.parameters()))
        optimizer.fails = False  # type: ignore[attr-defined]
        for parameter, kept in zip(model.parameters(), before, strict=True):
            parameter.data = kept
        step(**BATCH)
        assert all(torch.equal(*step.variables[name].values) for name, _ in model.named_parameters())


def test_a_handler_of_the_users_is_called_and_put_back() -> None:
    both, interrupter, calls = lockstep("threads"), Interrupter(), []

    def handler(number: int, frame: Any) -> None:
        calls.append(number)

    with python_handles_interrupts(), both.undisturbed.step, both.disturbed.step:
        signal.signal(signal.SIGINT, handler)
        for place in range(0, 900, 97):
            raised, has_trained = both.disturb(lambda run: interrupter.interrupted(run, place))  # noqa: B023
            assert (raised, has_trained) == (None, True) and calls == [signal.SIGINT]
            assert signal.getsignal(signal.SIGINT) is handler
            calls.clear()
        for other in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGINT, other)
            both.go_on()
            assert signal.getsignal(signal.SIGINT) is other


@pytest.mark.fast
def test_an_interrupt_is_kept_only_as_long_as_a_step_may_take_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, commit = InterruptGuard(), CommitPoint((), 1.0)
    with python_handles_interrupts():
        try:
            guard.begin()
            guard.commit = commit
            commit.commit()
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
            monkeypatch.setattr(interrupts, "_LONGEST_SECONDS", -1.0)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        finally:
            with pytest.raises(KeyboardInterrupt):
                guard.end()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
