"""Steps that have returned while buckets are in flight: whoever uses their variables has them finished first."""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Callable, Collection

from mirrorc.cluster.bounded_calls import in_bounded_time

logger = logging.getLogger(__name__)

_LONGEST_SECONDS_AT_EXIT = 60.0


class UnfinishedStep:
    """A step that has returned and has not updated all buckets. It is kept, with all that it needs, until it is finished.

    Args:
        ids: of the parameters that it updates.
        buckets: those that it has not updated yet.
        finish: updates them, and then calls `end`, whether that has failed or not.
    """

    def __init__(self, ids: Collection[int], buckets: Collection[int], finish: Callable[[], object]) -> None:
        self._ids, self.buckets, self.finish = frozenset(ids), frozenset(buckets), finish
        self._pid = os.getpid()
        _finish_at_exit()
        _unfinished.append(self)

    def concerns(self, ids: Collection[int]) -> bool:
        """Whether any of these tensors, given by their ids, is one of the parameters. In a forked process none is: the step is
        its parent's."""
        return self._pid == os.getpid() and not self._ids.isdisjoint(ids)

    def end(self) -> None:
        """Called when nothing is left to do, or can be done; may be repeated."""
        if self in _unfinished:
            _unfinished.remove(self)


_unfinished: list[UnfinishedStep] = []


def finish_steps(ids: Collection[int], besides: UnfinishedStep | None = None) -> None:
    """Finishes all steps that update any of these tensors, given by their ids, except one.

    Raises:
        ExecutionError, CommunicationError: a step could not be finished; says which.
    """
    for step in [step for step in _unfinished if step is not besides and step.concerns(ids)]:
        step.finish()


def finish_all_steps() -> None:
    """Finishes all steps of this process: before a compilation, which finds out only then what a step reads.

    Raises:
        ExecutionError, CommunicationError: a step could not be finished; says which.
    """
    for step in [step for step in _unfinished if step._pid == os.getpid()]:
        step.finish()


@functools.cache
def _finish_at_exit() -> None:
    """Has all steps finished before the process ends, as others wait for what it sends; after what ends connections was
    registered, so before that runs."""
    atexit.register(_finish_all)


def _finish_all() -> None:
    for step in [step for step in _unfinished if step._pid == os.getpid()]:
        try:
            in_bounded_time(step.finish, _LONGEST_SECONDS_AT_EXIT)
        except Exception as error:  # noqa: BLE001 - nobody is there to catch it
            logger.warning("the last step was not finished when the process ended: %s", error)
