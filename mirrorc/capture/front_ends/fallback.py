"""Tries front ends in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from mirrorc.capture.diagnostics.capture_errors import RaisedError, RaisedInTraceError, UnreadableError
from mirrorc.capture.front_ends.front_end import AUTO, FrontEnd, front_end_named, rungs
from mirrorc.errors import CaptureError
from mirrorc.messages.problem import message, with_line

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
    if (
        isinstance(first, UnreadableError)
        and first.at
        and str(first).partition("\n")[0] == str(error).partition("\n")[0]
    ):
        error.args = (with_line(str(error), "at", first.at),)
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    cause.__cause__ = first
    return error


def ladder_named(name: object) -> Ladder:
    return Ladder(rungs() if isinstance(name, str) and name == AUTO else [front_end_named(name)])
