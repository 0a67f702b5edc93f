"""A lane: a process group with a fixed order of launches."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable
from typing import Any

import torch

from mirrorc.errors import CommunicationError, ExecutionError
from mirrorc.torch_internals import GlooGroup, NcclGroup

_LONGEST_CLOSING_SECONDS = 10.0
_OF_GLOO = re.compile(r"^(\[[^]]*\] )*|\. This is typically.*$", re.DOTALL)  # where in its source, and advice


def in_words(error: Exception) -> str:
    return _OF_GLOO.sub("", (str(error).splitlines() or [type(error).__name__])[0])


class LostConnectionError(CommunicationError):
    """A connection to a worker is lost; the worker is not identified yet."""


class PayloadError(ExecutionError):
    """Failure of a user's payload. Other workers may be waiting for its next round."""


Group = GlooGroup | NcclGroup
"""An NCCL group only has all_reduce."""

Done = Callable[[Exception | None], None]
"""Called in the lane's thread at the end of a collective, with its error or None."""


def opened_group(store: Any, rank: int, num_workers: int, timeout_seconds: float, device: torch.device) -> Group:
    if device.type == "cuda":
        return NcclGroup(store, rank, num_workers, device)
    return GlooGroup(store, rank, num_workers, timeout_seconds)


class Lane:
    """Launches collectives over NCCL or gloo, and reports their ends in the order of launches.

    A thread of the lane waits for the collectives, because their waits ignore signals and timeouts.
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
        """Launches a collective without waiting. ``collective`` returns its work; ``done`` receives its error or None.

        After the first `SeveralRounds`, each collective is launched at the end of all earlier ones, so that all workers
        launch rounds in the same order.
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
        """Launches a collective and waits for it. Ctrl-C ends the wait, but not the collective.

        ``may_wait_on`` is called at each timeout; it returns True to wait once more.
        """
        outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self.launch(collective, outcomes.put)
        while True:
            try:
                error = outcomes.get(timeout=min(seconds, threading.TIMEOUT_MAX))
                break
            except queue.Empty:
                if not may_wait_on():
                    raise LostConnectionError(f"the other workers did not answer within {seconds:.0f} s") from None
        if error is not None:
            raise LostConnectionError(f"the other workers do not answer: {in_words(error)}") from error

    @property
    def is_broken(self) -> bool:
        group = self._group
        return group is not None and group.is_broken

    def cut(self) -> None:
        """Aborts all collectives; over gloo, on the other workers, too."""
        group = self._group
        if group is not None:
            group.cut()

    @property
    def is_deaf(self) -> bool:
        """True if collectives wait forever for a lost worker, as with NCCL."""
        return isinstance(self._group, NcclGroup)

    @property
    def is_closed(self) -> bool:
        return self._group is None

    def close(self) -> bool:
        """Ends all collectives. Returns False if one may still write to its memory."""
        self.cut()
        with self._launching:
            group, self._group = self._group, None
            self._works.put(group)  # the thread releases it, because it waits for all works
            del group
        if threading.current_thread() is not self._thread:
            self._thread.join(_LONGEST_CLOSING_SECONDS)
        return not self._thread.is_alive()


class SeveralRounds:
    """A work that launches further collectives in its `wait`."""

    def wait(self) -> None:
        raise NotImplementedError


class _InTurn:
    def __init__(self, launched: Callable[[Callable[[Any], Any]], Any], collective: Callable[[Any], Any]) -> None:
        self._launched, self._collective = launched, collective

    def wait(self) -> None:
        self._launched(self._collective).wait()


class _Failed:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> None:
        raise self._error


def _await_works(works: queue.SimpleQueue[tuple[Any, Done] | Group | None]) -> None:
    """Reports the ends of works in order. Returns the last entry, the group, to release it."""
    while isinstance(entry := works.get(), tuple):
        work, done = entry
        error: Exception | None = None
        try:
            work.wait()
        except Exception as raised:  # noqa: BLE001 - whoever waits raises it
            error = raised
        done(error)
        del entry, work, done, error
