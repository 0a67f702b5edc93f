"""The barrier at which all replicas commit a step together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from mirrorc.ir.devices import Device
from mirrorc.runtime.communication.rendezvous import Aborted, Rendezvous
from mirrorc.runtime.devices.events import record_event, wait_event
from mirrorc.runtime.workers.protocol.vote import Vote

TAKES_PLACE, SKIPPED, _STOPPED, _VOTING = "takes place", "skipped", "stopped", "voting"


_Numbers = tuple[tuple[torch.Tensor, ...], Any]
"""The numbers of a replica, and the event after which they can be read."""


@dataclass(frozen=True)
class OtherWorkers:
    """The other workers at the commit.

    Attributes:
        vote: see `Team.vote`. After the call, nothing on this worker stops the step.
        exchange_texts: returns each worker's name and text.
    """

    vote: Callable[[Vote], tuple[bool, torch.Tensor | None]]
    exchange_texts: Callable[[str], Sequence[tuple[str, str]]]


class CommitPoint:
    """Commits a step on all replicas or on none, or skips it.

    The first replica past the barrier decides, unless the step was stopped before. Deciding and stopping are atomic for
    threads and signals.

    Args:
        settle: called by each replica after the commit, before the updates.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        timeout_seconds: float,
        settle: Callable[[], None] = lambda: None,
        workers: OtherWorkers | None = None,
    ) -> None:
        self._devices, self._timeout_seconds = devices, timeout_seconds
        self._settle, self._workers = settle, workers
        self._all = range(len(devices))
        self._decision: dict[str, str] = {}
        self._numbers: list[_Numbers] = [((), None)] * len(devices)  # of each replica that has arrived
        self._is_suspended = False
        self._agreed_numbers: torch.Tensor | None = None  # the numbers that all workers use
        self._voting = threading.Lock()
        self.begin_afresh()

    @property
    def is_committed(self) -> bool:
        """True if the current step (between steps, the last one) has committed."""
        return self._decision.get("step") is TAKES_PLACE

    @property
    def is_skipped(self) -> bool:
        return self._decision.get("step") is SKIPPED

    @property
    def is_decided(self) -> bool:
        return self._decision.get("step") in (TAKES_PLACE, SKIPPED)

    @property
    def is_binding(self) -> bool:
        """True if the step cannot be stopped any more: it is decided, or workers vote on it."""
        return self._decision.get("step") in (TAKES_PLACE, SKIPPED, _VOTING)

    def begin(self) -> None:
        self._decision, self._agreed_numbers = {}, None
        self._numbers = [((), None)] * len(self._devices)

    def begin_afresh(self) -> None:
        self._rendezvous = Rendezvous("the commit", self._devices, self._timeout_seconds)

    def stop(self) -> bool:
        """Stops the step unless `is_binding`; returns True if stopped. Replicas then raise `Aborted` at the commit."""
        return self._decision.setdefault("step", _STOPPED) is _STOPPED

    def revoke(self) -> None:
        self._decision = {"step": _STOPPED}

    def commit(self) -> None:
        if not self._is_suspended:
            self._decide(TAKES_PLACE)

    def skip(self) -> None:
        self._decide(SKIPPED)

    def _decide(self, decision: str, numbers: torch.Tensor | None = None) -> None:
        """Raises `Aborted` if the step is stopped."""
        if self._workers is None:
            if self._decision.setdefault("step", decision) is not decision:
                raise Aborted
            return
        with self._voting:  # one replica votes, and the others wait for the outcome
            # `stop` may come at any moment: setdefault claims the vote in one operation; nobody stops a claimed vote, so a
            # plain assignment ends it
            if self._decision.setdefault("step", _VOTING) is _VOTING:
                try:
                    takes_place, self._agreed_numbers = self._workers.vote(self._make_vote(decision, numbers))
                    if not takes_place:
                        self._refuse()
                    self._decision["step"] = TAKES_PLACE if takes_place else SKIPPED
                except BaseException:
                    self._decision["step"] = _STOPPED
                    raise
            if self._decision["step"] is _STOPPED:
                raise Aborted

    def _make_vote(self, decision: str, numbers: torch.Tensor | None) -> Vote:
        return Vote(decision is TAKES_PLACE, numbers=numbers)

    def _refuse(self) -> None:
        """Called if a worker cannot commit. Raises an error, or lets all workers skip the step."""

    def abort(self) -> None:
        self._rendezvous.abort()

    def arrive(self, replica: int, *numbers: torch.Tensor) -> None:
        """Records that a replica can no longer fail, and its numbers for other replicas. Never blocks."""
        if numbers:
            self._numbers[replica] = numbers, record_event(self._devices[replica].torch_device)
        self._rendezvous.announce(replica)

    def leave(self, replica: int) -> torch.Tensor | None:
        """Waits for all replicas, and decides the step.

        Returns the replicas' numbers, [number, replica], or the workers' numbers, see
        `mirrorc.runtime.workers.protocol.vote.Columns`; None without numbers.
        """
        self._rendezvous.await_replicas(replica, self._all)
        met = self._met(replica)
        if not self._is_suspended:
            self._decide(TAKES_PLACE, met)
        return self._numbers_for_all(met)

    def _numbers_for_all(self, met: torch.Tensor | None) -> torch.Tensor | None:
        self._settle()
        return met if self._agreed_numbers is None or met is None else self._agreed_numbers.to(met)

    def _met(self, replica: int) -> torch.Tensor | None:
        if not self._numbers[replica][0]:
            return None
        device = self._devices[replica].torch_device
        rows = []
        for values, event in self._numbers:
            wait_event(event, device)
            rows.append(torch.stack(values).to(device, non_blocking=True))
        return torch.stack(rows, dim=1)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which replicas pass without a decision, because calls are only captured."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False
