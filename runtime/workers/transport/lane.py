"""A lane: a group of the workers, whose collectives are launched in one order and awaited by a thread of its own."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable
from typing import Any

import torch

from mirrorc.errors import CommunicationError
from mirrorc.torch_internals import GlooGroup, NcclGroup

_LONGEST_CLOSING_SECONDS = 10.0
_OF_GLOO = re.compile(r"^(\[[^]]*\] )*|\. This is typically.*$", re.DOTALL)  # where in its source, and advice


def in_words(error: Exception) -> str:
    """What gloo, or a store, says of a connection, in short."""
    return _OF_GLOO.sub("", (str(error).splitlines() or [type(error).__name__])[0])


class LostConnectionError(CommunicationError):
    """Another worker does not answer, or the connection to it broke; nobody knows yet which one."""


Group = GlooGroup | NcclGroup
"""What a lane launches its collectives over; one of NCCL adds up alone."""

Done = Callable[[Exception | None], None]
"""Called when a collective is done, in the lane's thread; with the error if it has failed."""


def opened_group(store: Any, rank: int, num_workers: int, timeout_seconds: float, device: torch.device) -> Group:
    """The group of a lane; its arguments are the lane's."""
    if device.type == "cuda":
        return NcclGroup(store, rank, num_workers, device)
    return GlooGroup(store, rank, num_workers, timeout_seconds)


class Lane:
    """Launches collectives one at a time, and tells when each is done, in the order of their launches.

    Waiting for a collective is deaf to signals, and a device that waits has a bound of its own. So a thread of the lane waits,
    and the others wait for what it tells.

    Args:
        store: where the workers meet; nothing else uses its keys.
        rank, num_workers: of this worker, and how many there are.
        timeout_seconds: the longest time of each collective, and of the first meeting.
        name: of the thread.
        device: where the tensors lie. Those of a GPU go over NCCL, all others over gloo.

    Raises:
        RuntimeError: the workers did not meet in time, or the store was lost.
    """

    def __init__(
        self, store: Any, rank: int, num_workers: int, timeout_seconds: float, name: str, device: torch.device
    ) -> None:
        self._group: Group | None = opened_group(store, rank, num_workers, timeout_seconds, device)
        self._launching = threading.Lock()
        self._takes_turns = False
        self._works: queue.SimpleQueue[tuple[Any, Done] | Group | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_await_works, args=(self._works,), name=name, daemon=True)
        self._thread.start()

    def launch(self, collective: Callable[[Any], Any], done: Done) -> None:
        """Launches a collective, which ``collective`` gives as a work; does not wait for it. If that fails, ``done`` is told.

        From the first work of `SeveralRounds` on, each is launched when those before it are done: then all workers launch the
        rounds of all of them in one order, too.
        """
        with self._launching:
            try:
                work = _InTurn(self._launched, collective) if self._takes_turns else self._launched(collective)
            except RuntimeError as error:
                work = _Failed(error)
            self._takes_turns = self._takes_turns or isinstance(work, SeveralRounds)
            self._works.put((work, done))

    def _launched(self, collective: Callable[[Any], Any]) -> Any:
        group = self._group
        if group is None:
            raise RuntimeError("the connection to the other workers is closed")
        return collective(group)

    def call(
        self, collective: Callable[[Any], Any], seconds: float, may_wait_on: Callable[[], bool] = lambda: False
    ) -> None:
        """Launches a collective and returns when it is done; Ctrl-C can cut the wait short, not the collective.

        ``may_wait_on`` is asked whenever the seconds are over, whether to wait as long again.

        Raises:
            LostConnectionError: it has failed, or has told nothing in this time.
        """
        told: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self.launch(collective, told.put)
        while True:
            try:
                error = told.get(timeout=min(seconds, threading.TIMEOUT_MAX))
                break
            except queue.Empty:
                if not may_wait_on():
                    raise LostConnectionError(f"the other workers did not answer within {seconds:.0f} s") from None
        if error is not None:
            raise LostConnectionError(f"the other workers do not answer: {in_words(error)}") from error

    @property
    def is_broken(self) -> bool:
        """Whether another worker has closed its connection to this one."""
        group = self._group
        return group is not None and group.is_broken

    def cut(self) -> None:
        """Ends all collectives with an error, here and on the other workers."""
        group = self._group
        if group is not None:
            group.cut()

    @property
    def is_deaf(self) -> bool:
        """Whether its collectives wait for ever for a worker that is gone, as those of NCCL do."""
        return isinstance(self._group, NcclGroup)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._group is None

    def close(self) -> bool:
        """Ends all collectives, and the thread; returns whether that was done in time. Then no memory that was given to the lane
        is written any more."""
        self.cut()
        with self._launching:
            group, self._group = self._group, None
            self._works.put(group)  # the thread lets it go: it waits for all works, however long these take
            del group
        if threading.current_thread() is not self._thread:
            self._thread.join(_LONGEST_CLOSING_SECONDS)
        return not self._thread.is_alive()


class SeveralRounds:
    """A work that launches further collectives while it is waited for."""

    def wait(self) -> None:
        """Returns when all of them are done."""
        raise NotImplementedError


class _InTurn:
    """A work that is launched when it is waited for."""

    def __init__(self, launched: Callable[[Callable[[Any], Any]], Any], collective: Callable[[Any], Any]) -> None:
        self._launched, self._collective = launched, collective

    def wait(self) -> None:
        self._launched(self._collective).wait()


class _Failed:
    """A work that could not be launched."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


def _await_works(works: queue.SimpleQueue[tuple[Any, Done] | Group | None]) -> None:
    """The main function of a lane's thread, which ends when it is given the group, to let it go."""
    while isinstance(given := works.get(), tuple):
        work, done = given
        error: Exception | None = None
        try:
            work.wait()
        except Exception as raised:  # noqa: BLE001 - whoever waits raises it
            error = raised
        done(error)
        del given, work, done, error
