"""Events in which a step is interrupted or fails: it leaves the state of before, or is whole."""

import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch

import mirrorc
from fuzzed_training.events import draw_batch, event
from fuzzed_training.models import POISON, POISON_IN_BACKWARD
from fuzzed_training.pair import REFUSALS, Pair
from fuzzed_training.plans import draw_plans
from fuzzed_training.settings import (
    MAX_GRAD_NORMS,
    MAX_GRAD_VALUES,
    MICROBATCHES,
    OPTIONAL_PASSES,
    Distribution,
    has_factors,
)
from mirrorc.runtime.devices.thread_pool import DevicePool

_ROOT = Path(mirrorc.__file__).parents[1]
_RUNTIME = str(_ROOT / "runtime")
_OURS = tuple(str(_ROOT / folder) for folder in ("mirrorc", "passes", "runtime"))


@event
def fail_on_a_replica(pair: Pair, draw: Random) -> None:
    batch, poison = draw_batch(pair, draw), draw.choice((2 * POISON, 2 * POISON_IN_BACKWARD))
    held = {id(p) for group in pair.twin.optimizer.param_groups for p in group["params"] if p.requires_grad}
    before = [p for name, p in pair.twin.parameters().items() if name.startswith(("trunk", "norm", "table"))]
    if held.isdisjoint(map(id, before)):  # so nothing needs that backward
        poison = 2 * POISON
    batch["x"][draw.randrange(len(batch["x"]))] = poison  # type: ignore[index,arg-type]
    if pair.twin.model.has["fails"]:  # type: ignore[index,operator]
        _fail(pair, batch, "poison")


@event
def fail_an_assert(pair: Pair, draw: Random) -> None:
    batch = draw_batch(pair, draw)
    batch["x"][draw.randrange(len(batch["x"]))] = draw.choice((torch.inf, torch.nan))  # type: ignore[index,arg-type]
    if pair.twin.model.has["asserts"]:  # type: ignore[index,operator]
        _fail(pair, batch, 'the batch is "not" finite|poison')


def _fail(pair: Pair, batch: dict[str, Any], pattern: str) -> None:
    before = pair.begin(batch)
    try:
        pair.step(**batch)
    except REFUSALS as error:
        is_expected = re.search(pattern, str(error)) or pair.expects(error)
        assert is_expected, f"a step failed for another reason than {pattern}: {error}"
    else:
        raise AssertionError("a step did not fail that had to")
    before.assert_unchanged("a failed step")


@event
def fail_to_allocate(pair: Pair, draw: Random) -> None:
    """Memory is short at some allocation of a step, most often while it is laid out, anew or not; it fails or is whole."""
    how = draw.random()
    if how < 0.4:
        pair.compile_again(draw_distribution(draw))
    elif how < 0.8:  # the same step needs other buckets
        name = draw.choice([name for name in pair.twin.parameters() if "head" not in name])
        for side in pair.sides:
            side.parameters()[name].requires_grad_(not side.parameters()[name].requires_grad)
    batch = draw_batch(pair, draw)
    before = pair.begin(batch)
    place = draw.choice(("", "state/variables.py", "state/flat_state.py"))
    with failing_allocations(draw.randrange(4 if place else 30), f"{_RUNTIME}/{place}") as has_failed:
        try:
            pair.step(**batch)
        except (MemoryError, *REFUSALS) as error:
            doubted = pair.expects(error)
            assert has_failed or doubted, f"a step failed without need: {error}"
            before.assert_unchanged("a step that had no memory")
            return
    pair.follow(batch)


@contextmanager
def failing_allocations(which: int, place: str) -> Iterator[list[bool]]:
    """Raises MemoryError at the allocation of that number, and none after it; the list tells whether it has.

    Only those in files of the runtime whose path begins with ``place`` count.
    """
    left, has_failed = [which], []

    def limited(function: Any) -> Any:
        def allocate(*args: Any, **kwargs: Any) -> Any:
            left[0] -= sys._getframe(1).f_code.co_filename.startswith(place)
            if left[0] < 0 and not has_failed:
                has_failed.append(True)
                raise MemoryError("no memory is left")
            return function(*args, **kwargs)

        return allocate

    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "zeros", "empty_like", "zeros_like", "full", "cat"):
            patch.setattr(torch, name, limited(getattr(torch, name)))
        yield has_failed


@event
def interrupt(pair: Pair, draw: Random) -> None:
    """SIGINT arrives at some line of mirrorc, in the caller's thread or while a device's thread is at that line."""
    if threading.current_thread() is not threading.main_thread():
        return
    if draw.random() < 0.3:
        pair.compile_again(draw_distribution(draw))
    is_first = pair.num_calls == 0
    line = draw.randrange(600) if not is_first else int(2 ** (18 * draw.random()))
    _interrupt(pair, draw_batch(pair, draw), interrupted_at(line, in_a_device=draw.random() < 0.3))


def _interrupt(pair: Pair, batch: dict[str, Any], interrupted: Any) -> None:
    before = pair.begin(batch)
    is_interrupted = False
    with interrupted as has_come:
        try:
            pair.step(**batch)
        except KeyboardInterrupt:
            is_interrupted = True
        except REFUSALS as error:
            assert pair.expects(error), f"an interrupted step fails: {error}"
            before.assert_unchanged("a refused step")
            assert not has_come, "an interrupt was swallowed"
            return
    assert is_interrupted == bool(has_come), f"raised: {is_interrupted}, but the signal has come: {bool(has_come)}"
    if is_interrupted:
        pair.log.append(f"interrupted at {has_come[0]}; then, compared with the state before: {pair.differences()[:3]}")
    if is_interrupted and not pair.differences() and pair.keeps_the_same():
        assert not pair.has_drawn(), "an interrupted step has drawn from torch's generator"
        return
    pair.follow(batch)


@event
def interrupt_at_random(pair: Pair, draw: Random) -> None:
    """A real SIGINT arrives at a moment that no seed repeats."""
    if threading.current_thread() is threading.main_thread():
        _interrupt(pair, draw_batch(pair, draw), interrupted_after(draw.random() * 0.01))


@contextmanager
def interrupted_after(seconds: float) -> Iterator[list[str]]:
    """Sends SIGINT after a time; if the block has ended by then, nothing comes of it."""
    where: list[str] = []

    def raise_within_a_step(number: int, frame: FrameType | None) -> None:
        inner: FrameType | None = sys._getframe()
        while inner is not None and inner.f_code is not mirrorc.Step.__call__.__code__:
            inner = inner.f_back
        if inner is not None:
            where.append(f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "no line")
            raise KeyboardInterrupt

    def note_what_is_lost(unraisable: Any) -> None:
        """Python drops what is raised while it runs the callback of a weak reference, say."""
        if unraisable.exc_type is KeyboardInterrupt:
            where.clear()

    former_handler = signal.signal(signal.SIGINT, raise_within_a_step)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "unraisablehook", note_what_is_lost)
            yield where
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGINT, former_handler)


@contextmanager
def interrupted_at(line: int, in_a_device: bool) -> Iterator[list[str]]:
    """Sends SIGINT when so many lines of mirrorc have been run; the list then has the line."""
    left, where = [line], []
    lock = threading.Lock()

    def trace(frame: FrameType, what: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        if what == "line":
            with lock:
                left[0] -= 1
                is_due = left[0] == -1
            if is_due:
                where.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
        return trace

    def traced(job: Any) -> Any:
        def run() -> Any:
            sys.settrace(trace)
            try:
                return job()
            finally:
                sys.settrace(None)

        return run

    own_run = DevicePool.run
    former_trace, former_handler = sys.gettrace(), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        if in_a_device:
            patch.setattr(DevicePool, "run", lambda pool, jobs, *more: own_run(pool, [*map(traced, jobs)], *more))
        else:
            sys.settrace(trace)
        try:
            yield where
        finally:
            sys.settrace(former_trace)
            signal.signal(signal.SIGINT, former_handler)


def draw_distribution(draw: Random) -> Distribution:
    found = Distribution(
        num_devices=draw.choice((1, 2, 2, 3, 4)),
        link=draw.choice((None, None, "copy")),
        left_out=tuple(name for name in OPTIONAL_PASSES if draw.random() < 0.25),
        bucket_bytes=draw.choice((2**20, 200, 400)),
        factors=draw.random() < 0.3,
        exact_order=draw.random() < 0.2,
        is_checked=draw.random() < 0.3,
        microbatches=draw.choice(MICROBATCHES),
        max_grad_norm=draw.choice(MAX_GRAD_NORMS),
        max_grad_value=draw.choice(MAX_GRAD_VALUES),
        recomputes=draw.random() < 0.25,
    )
    return replace(found, plans=draw_plans(draw, has_factors=has_factors(found.left_out, found.exact_order)))


@event
def compile_again(pair: Pair, draw: Random) -> None:
    pair.compile_again(draw_distribution(draw))
