"""Tries front ends in turn."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from mirrorc.capture.diagnostics.capture_errors import LoneExampleError, UnreadableError
from mirrorc.capture.front_ends.front_end import AUTO, FrontEnd, front_end_named, rungs
from mirrorc.errors import CaptureError

T = TypeVar("T")


@dataclass(frozen=True)
class Climbed(Generic[T]):
    """The first capture that succeeded, and why earlier front ends failed."""

    result: T
    front_end: FrontEnd
    failed: tuple[tuple[FrontEnd, str], ...]

    def remarks(self, model_name: str) -> list[str]:
        return [
            f"captured with capture={self.front_end.name!r}, because {failed.name!r} cannot capture {model_name}{why}"
            for failed, why in self.failed
        ]

    def warning(self, model_name: str) -> str:
        if not self.failed:
            return ""
        first, why = self.failed[0]
        name = self.front_end.name
        by_data = "Each replica goes by the values of its own shard. " if self.front_end.needs_data else ""
        return (
            f"{model_name} trains with capture={name!r}: {self.front_end.words}, because {first.name!r} cannot capture it{why}. "
            f"{by_data}Say capture={name!r} to have that without this warning, or capture={first.name!r} for an error that says "
            "what to change"
        )


class Ladder:
    """Front ends in order of preference. Only an `UnreadableError` of the first one leads to the next."""

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
                return Climbed(result, front_end, tuple((refused, _why(error)) for refused, error in errors))
        raise _joined(errors[0], errors[-1]) from errors[-1][1].__cause__


def _why(error: CaptureError) -> str:
    return error.why if isinstance(error, UnreadableError) else f": {error}"


def _joined(of_first: tuple[FrontEnd, CaptureError], of_last: tuple[FrontEnd, CaptureError]) -> CaptureError:
    (above, first), (below, last) = of_first, of_last
    kind = LoneExampleError if isinstance(last, LoneExampleError) else CaptureError
    refusal = first.refusal if isinstance(first, UnreadableError) else first
    if _is_raised_elsewhere(last.__cause__):
        return kind(f"{last} With capture={above.name!r}, which was tried first: {refusal}")
    return kind(f"{refusal} With capture={below.name!r}, which was tried last: {last}")


def _is_raised_elsewhere(cause: BaseException | None) -> bool:
    if cause is None:
        return False
    frames = traceback.extract_tb(cause.__traceback__)
    return bool(frames) and _OWN_FOLDER not in Path(frames[-1].filename).parents


_OWN_FOLDER = Path(__file__).parents[2]


def ladder_named(name: object) -> Ladder:
    """The front ends of ``capture=``: all rungs for "auto"."""
    return Ladder(rungs() if isinstance(name, str) and name == AUTO else [front_end_named(name)])
