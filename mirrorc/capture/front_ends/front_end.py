"""The interface, registry and order of front ends, and guards on the Python state that a graph depends on."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from mirrorc.capture.call.traced_loss import TracedLoss
from mirrorc.capture.call.traced_outputs import TracedOutputs
from mirrorc.capture.diagnostics.capture_errors import RaisedError, RaisedInTraceError, UnreadableError
from mirrorc.capture.diagnostics.loss_means import Reduction, WeightedMean
from mirrorc.capture.diagnostics.python_effects import Note
from mirrorc.errors import CaptureError
from mirrorc.ir.graph_edits import collector_paused
from mirrorc.messages.problem import message, problem, with_line
from mirrorc.torch_internals import Decompositions, JointGraph, restored_tracing_state
from mirrorc.user.restore import restored


class Guards(Protocol):
    """Checks Python state that is not in the key of a specialization. Runs before every step, in microseconds."""

    @property
    def numbers(self) -> tuple[int | float, ...]:
        """The Python numbers that are inputs of the graph, as read by `hold`."""

    @property
    def draws(self) -> Sequence[object]:
        """Each step's draws from Python's random and numpy's, in order."""

    def begin_step(self) -> Callable[[], None]:
        """Advances generators past the draws of `hold`, and reads Python state. Returns a function to undo the step."""

    def changed_numbers(self) -> list[str]:
        """Expressions of numbers that differ from the graph's constants."""

    def hold(self) -> bool:
        """True if a trace would read the same state."""

    def broken(self) -> str:
        """Describes the change, with its line, after `hold` has returned False."""


class AllGuards:
    def __init__(self, parts: Sequence[Guards] = ()) -> None:
        self._parts = tuple(parts)

    @property
    def numbers(self) -> tuple[int | float, ...]:
        return tuple(number for part in self._parts for number in part.numbers)

    def numbers_by_graph(self) -> list[tuple[int | float, ...]]:
        return [part.numbers for part in self._parts]

    @property
    def draws(self) -> Sequence[object]:
        return self._parts[0].draws if self._parts else ()

    def begin_step(self) -> Callable[[], None]:
        return self._parts[0].begin_step() if self._parts else lambda: None

    def changed_numbers(self) -> list[str]:
        return [name for part in self._parts for name in part.changed_numbers()]

    def hold(self) -> bool:
        for part in self._parts:  # noqa: SIM110 - it takes half the time of a generator
            if not part.hold():
                return False
        return True

    def broken(self) -> str:
        return next((part.broken() for part in self._parts if not part.hold()), "")


NO_GUARDS = AllGuards()
"""For a graph without Python state beyond the key of its specialization."""


@dataclass(frozen=True)
class Traced:
    """The result of a front end.

    Attributes:
        alike: paths of further buffers with one value on all replicas.
        undefined: the line of an operator outside of the graph that returns NaN for one example.
        written_rows: buffers in which shards write different rows, if this is not in the graph.
        means_of_shards: the means over targets in each shard, if these are not in the graph.
    """

    joint: JointGraph
    guards: Guards = NO_GUARDS
    notes: tuple[Note, ...] = ()
    outputs: TracedOutputs | None = None
    remarks: tuple[str, ...] = ()
    alike: Sequence[str] = ()
    weighted_means: tuple[WeightedMean, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    leaves_with_time_first: tuple[int, ...] = ()
    leaves_with_offsets: tuple[int, ...] = ()
    undefined: str = ""
    written_rows: tuple[str, ...] = ()
    means_of_shards: tuple[tuple[WeightedMean, ...], ...] = ()


class FrontEnd(ABC):
    """Traces a training call on example tensors, with guards on Python state.

    Attributes:
        words: describes how steps run; follows a colon.
        needs_data: it runs forward on the data of all shards.
    """

    name: ClassVar[str]
    words: ClassVar[str] = "as graphs"
    needs_data: ClassVar[bool] = False

    @abstractmethod
    def trace(
        self, stack: ExitStack, call: TracedLoss, leaves: Sequence[torch.Tensor], decompositions: Decompositions
    ) -> Traced:
        """Traces a call to one functional graph; an `TracedEvaluation` has only a forward.

        ``stack`` keeps contexts open until the graph is restructured. The graph is specialized on types of ``leaves``.

        Raises:
            CaptureError: with the user's line, the reason and a remedy.
        """

    def trace_outputs(self, call: TracedLoss, leaves: Sequence[torch.Tensor]) -> TracedOutputs | None:
        """The outputs for tensors of other sizes; None if unknown."""
        return None


AUTO = "auto"
"""Selects the first front end that can capture the model."""

_front_ends: dict[str, FrontEnd] = {}
_rungs: list[FrontEnd] = []


def register_front_end(front_end: FrontEnd, *, is_rung: bool = False) -> None:
    """If ``is_rung``, "auto" tries the front end after those registered before."""
    if front_end.name in _front_ends:
        raise ValueError(f"MC4005: there is a front end {front_end.name!r} already: give this one another name")
    _front_ends[front_end.name] = front_end
    if is_rung:
        _rungs.append(front_end)


def unregister_front_end(name: str) -> None:
    front_end = _front_ends.pop(name)
    if front_end in _rungs:
        _rungs.remove(front_end)


def rungs() -> list[FrontEnd]:
    return list(_rungs)


def front_end_named(name: object) -> FrontEnd:
    if isinstance(name, str) and name == AUTO:
        return rungs()[0]
    front_end = _front_ends.get(name) if isinstance(name, str) else None
    if front_end is None:
        raise ValueError(f"MC1002: capture is {name!r}: choose one of {', '.join((AUTO, *_front_ends))}")
    return front_end


_CAPTURING = threading.RLock()
_LONGEST_CAPTURE_SECONDS = 3600


@contextlib.contextmanager
def _exclusive() -> Iterator[None]:
    """One thread traces at a time, because torch's tracers change settings of the process."""
    if not _CAPTURING.acquire(timeout=_LONGEST_CAPTURE_SECONDS):
        raise problem(
            CaptureError,
            f"MC5008: gave up after {_LONGEST_CAPTURE_SECONDS} s: another thread captures a model",
            "only one model of a process can be captured at a time",
            (
                "make first calls one after the other",
                f"py-spy dump --pid {os.getpid()}, which shows where that thread waits",
            ),
        )
    try:
        yield
    finally:
        _CAPTURING.release()


@contextlib.contextmanager
def tracing(call: TracedLoss) -> Iterator[ExitStack]:
    with _exclusive(), restored(call), collector_paused(), ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(call.trains))
        stack.enter_context(restored_tracing_state())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "To copy construct from a tensor")  # of arrays, which are tensors in a trace
        yield stack


T = TypeVar("T")


@dataclass(frozen=True)
class Climbed(Generic[T]):
    result: T
    front_end: FrontEnd
    failed: tuple[tuple[FrontEnd, str], ...]
    errors: tuple[CaptureError, ...] = ()

    def remarks(self, model_name: str) -> list[str]:
        return [
            f"captured with capture={self.front_end.name!r}, because {failed.name!r} cannot capture {model_name}: {why}"
            for failed, why in self.failed
        ]

    def warning(self, model_name: str) -> str:
        if not self.failed:
            return ""
        first, why = self.failed[0]
        name = self.front_end.name
        by_data = "; each replica goes by the values of its own shard" if self.front_end.needs_data else ""
        return message(
            f"MC2701: {model_name} trains with capture={name!r}: {self.front_end.words}{by_data}",
            f"{first.name!r} cannot capture it, {why}",
            (
                f"compiler=mirrorc.Compiler(capture={name!r}), for the same without this warning",
                f"compiler=mirrorc.Compiler(capture={first.name!r}), for an error that says what to change",
            ),
        )


class Ladder:
    """Front ends in order of preference. Only an `UnreadableError` of the first front end leads to the next.

    An exception of the user's code counts as one, because code may branch on `torch.compiler.is_compiling`.
    """

    def __init__(self, front_ends: Sequence[FrontEnd]) -> None:
        self._front_ends = tuple(front_ends)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(front_end.name for front_end in self._front_ends)

    @property
    def first(self) -> Ladder:
        return Ladder(self._front_ends[:1])

    def climb(self, attempt: Callable[[FrontEnd], T]) -> Climbed[T]:
        errors: list[tuple[FrontEnd, CaptureError]] = []
        for front_end in self._front_ends:
            try:
                result = attempt(front_end)
            except CaptureError as error:
                if len(self._front_ends) == 1 or not (errors or isinstance(error, UnreadableError)):
                    raise
                errors.append((front_end, error))
            else:
                failed = tuple((refused, _why(error)) for refused, error in errors)
                return Climbed(result, front_end, failed, tuple(error for _, error in errors))
        first, last = errors[0][1], errors[-1][1]
        if isinstance(first, RaisedInTraceError) and isinstance(last, RaisedError):
            raise (first.of_plain(last.reason) if first.line == last.line else last) from last.__cause__
        raise _with_first_attempt(last, first)


def _why(error: CaptureError) -> str:
    return error.why if isinstance(error, UnreadableError) else str(error).partition("\n")[0]


def _with_first_attempt(error: CaptureError, first: CaptureError) -> CaptureError:
    are_alike = str(first).partition("\n")[0] == str(error).partition("\n")[0]
    if isinstance(first, UnreadableError) and first.at and are_alike:
        error.args = (with_line(str(error), "at", first.at),)
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    cause.__cause__ = first
    return error


def ladder_named(name: object) -> Ladder:
    return Ladder(rungs() if isinstance(name, str) and name == AUTO else [front_end_named(name)])
