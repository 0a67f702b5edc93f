"""The front ends that are tried one after the other, until one can capture a model."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from mirrorc.capture.diagnostics.errors import LoneExampleError, UnreadableError
from mirrorc.capture.front_ends.front_end import AUTO, FrontEnd, front_end_named, rungs
from mirrorc.errors import CaptureError

T = TypeVar("T")


@dataclass(frozen=True)
class Climbed(Generic[T]):
    """What the front end has given that could capture a model.

    Attributes:
        found: what it has given.
        front_end: which one it was.
        failed: those above it, and why each could not, as what follows "cannot capture" and the model's name.
    """

    found: T
    front_end: FrontEnd
    failed: tuple[tuple[FrontEnd, str], ...]

    def remarks(self, what: str) -> list[str]:
        """What readers of the program are told of the front ends that could not capture ``what``."""
        return [
            f"captured with capture={self.front_end.name!r}, because {failed.name!r} cannot capture {what}{why}"
            for failed, why in self.failed
        ]

    def warning(self, what: str) -> str:
        """The same for the user, with what he can do; empty if the first front end could."""
        if not self.failed:
            return ""
        first, why = self.failed[0]
        name = self.front_end.name
        by_data = "Each replica goes by the values of its own shard. " if self.front_end.needs_data else ""
        return (
            f"{what} trains with capture={name!r}: {self.front_end.words}, because {first.name!r} cannot capture it{why}. "
            f"{by_data}Say capture={name!r} to have that without this warning, or capture={first.name!r} for an error that says "
            "what to change"
        )


class Ladder:
    """Front ends, those of the fastest programs first.

    The first leaves to the others what it cannot read: Python that it does not know, or a branch that depends on data. What is
    refused for its meaning, such as a loss that is no scalar, is refused by the first. Whatever one of the others refuses, the
    next one tries.

    Args:
        front_ends: one or more.
    """

    def __init__(self, front_ends: Sequence[FrontEnd]) -> None:
        self._front_ends = tuple(front_ends)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the front ends."""
        return tuple(one.name for one in self._front_ends)

    @property
    def first(self) -> Ladder:
        """The first front end alone."""
        return Ladder(self._front_ends[:1])

    def climb(self, attempt: Callable[[FrontEnd], T]) -> Climbed[T]:
        """What the first front end gives that can capture a model.

        Args:
            attempt: captures all shards of a step with a front end.

        Raises:
            CaptureError: none can: that of the first, with that of the last, whose cause is what the user's code raised, if it
                did; or the model is refused for its meaning.
        """
        errors: list[tuple[FrontEnd, CaptureError]] = []
        for front_end in self._front_ends:
            try:
                found = attempt(front_end)
            except CaptureError as error:
                if len(self._front_ends) == 1 or not (errors or isinstance(error, UnreadableError)):
                    raise
                errors.append((front_end, error))
            else:
                return Climbed(found, front_end, tuple((one, _why(error)) for one, error in errors))
        raise _joined(errors[0], errors[-1]) from errors[-1][1].__cause__


def _why(error: CaptureError) -> str:
    return error.why if isinstance(error, UnreadableError) else f": {error}"


def _joined(of_first: tuple[FrontEnd, CaptureError], of_last: tuple[FrontEnd, CaptureError]) -> CaptureError:
    """The error of the first front end, with that of the last; of the kind that has a remedy of its own.

    What the user's code raised in plain PyTorch, which is the cause of the last one's error then, comes first.
    """
    (above, first), (below, last) = of_first, of_last
    kind = LoneExampleError if isinstance(last, LoneExampleError) else CaptureError
    refusal = first.refusal if isinstance(first, UnreadableError) else first
    if _is_raised_elsewhere(last.__cause__):
        return kind(f"{last} With capture={above.name!r}, which was tried first: {refusal}")
    return kind(f"{refusal} With capture={below.name!r}, which was tried last: {last}")


def _is_raised_elsewhere(cause: BaseException | None) -> bool:
    """Whether an error was raised by other code than this compiler's: the user's, or what that has called."""
    if cause is None:
        return False
    frames = traceback.extract_tb(cause.__traceback__)
    return bool(frames) and _OWN_FOLDER not in Path(frames[-1].filename).parents


_OWN_FOLDER = Path(__file__).parents[2]


def ladder_named(name: object) -> Ladder:
    """The front ends that ``capture=`` stands for: those of the ladder for "auto", and else the one of this name.

    Raises:
        ValueError: there is none; lists those that there are.
    """
    return Ladder(rungs() if isinstance(name, str) and name == AUTO else [front_end_named(name)])
