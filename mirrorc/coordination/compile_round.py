"""A call of `mirrorc.compile` that several workers make together: joining them, and telling them if it fails on this one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from numbers import Real
from types import TracebackType
from typing import Any

from mirrorc.cluster import Cluster, Round, find_place, join
from mirrorc.ir.workers import World
from mirrorc.options.tf_communication import CommunicationOptions

_DOING = "mirrorc.compile"


class JointCompilation(AbstractContextManager["JointCompilation"]):
    """A block that is one call. It begins when all workers have joined; what is raised in it is told to the others, who wait for
    this one no longer.

    So everything that may be wrong on one worker alone is looked at within the block. Only what says with whom to join comes
    before: a worker that does not know it can tell nobody.

    Args:
        asked: the arguments of `mirrorc.compile`, by name; they may be wrong.

    Raises:
        TypeError, ValueError: on entering, what describes the workers is wrong; or a group is given to a process that is to train
            alone.
        CommunicationError: on entering, see `mirrorc.cluster.join`.

    Attributes:
        cluster: the workers; None for a process that trains alone, or compiles for a world that is not there.
        round: what they do together.
    """

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self._asked = asked
        self.cluster: Cluster | None = None
        self.round: Round | None = None

    def __enter__(self) -> JointCompilation:
        self.cluster = _joined_workers(self._asked)
        if self.cluster is not None:
            self.round = self.cluster.begin(_DOING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self.round is not None:
            self.round.fail(error)


def _joined_workers(asked: Mapping[str, Any]) -> Cluster | None:
    """The workers that this process trains with, when all have come; None if there are no others."""
    group = asked["process_group"]
    if isinstance(asked["world"], World):
        return None
    if asked["workers"] is None:
        if group is not None:
            raise ValueError(
                "process_group= names workers, and workers=None trains without others: leave out one of them"
            )
        return None
    try:
        place = find_place(group)
    except ValueError as error:
        raise ValueError(f"{error}; or give workers=None, to train in this process alone") from None
    return None if place.num_workers == 1 else join(group, **_longest_wait(asked))


def _longest_wait(asked: Mapping[str, Any]) -> dict[str, float]:
    """How long to wait for the others, as an argument of `join`.

    A time that is wrong is refused within the block, so that the others are told; until then they are waited for as long as
    `join` does by itself.
    """
    options = asked["communication_options"]
    told = options.timeout_seconds if isinstance(options, CommunicationOptions) else None
    seconds: Any = asked["timeout_seconds"] if told is None else told
    is_time = isinstance(seconds, Real) and not isinstance(seconds, bool) and float(seconds) > 0
    return {"timeout_seconds": float(seconds)} if is_time else {}
