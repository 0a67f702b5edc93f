"""The roll call: a rendezvous in a store, with one verdict for all workers."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from mirrorc.cluster.place import Place
from mirrorc.cluster.stores import SEE_STORE, first_line
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import numbered

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LOOKS = 0.02
_PATIENCE_SECONDS = 30.0  # a longer roll call logs which workers are missing
_LONGEST_READING_SECONDS = 5.0  # the store's host stays this long, so that others can read the verdict
_VERDICT, _NUM_COME, _NUM_READ, _NUM_JUDGES = "verdict", "come", "read", "judges"


def _versions() -> dict[str, str]:
    python = ".".join(platform.python_version_tuple()[:2])
    return {"torch": torch.__version__, "mirrorc": version("mirrorc"), "Python": python}


def local_system() -> str:
    """The boot and pid namespace in which this process's pid is valid; empty if unknown."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True)
class Worker:
    """A worker's description of itself."""

    rank: int
    num_workers: int
    machine: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    versions: Mapping[str, str] = field(default_factory=_versions)
    system: str = field(default_factory=local_system)

    def __str__(self) -> str:
        return f"worker {self.rank} ({self.machine}, process {self.pid})"


def call_roll(
    store: Any, place: Place, deadline: float, while_waiting: Callable[[], object] = lambda: None
) -> list[Worker]:
    """Waits for all workers, and returns them by rank; if one is late or does not match, all raise CommunicationError.

    The verdict comes from the first worker that sees all others, a mismatch or the deadline. Later workers are refused.
    """
    try:
        return _call_roll(store, place, deadline, Worker(place.rank, place.num_workers), while_waiting)
    except RuntimeError as error:  # torch's errors of stores; CommunicationError is none of them
        where = f" at {place.address}" if place.host else ""
        raise problem(
            CommunicationError,
            f"MC6204: {place}: the workers' store{where} was lost while workers joined",
            first_line(error),
            SEE_STORE,
        ) from error


def _call_roll(
    store: Any, place: Place, deadline: float, newcomer: Worker, while_waiting: Callable[[], object]
) -> list[Worker]:
    came: dict[int, Worker] = {}  # by the order of arrival, from 1
    number = store.add(_NUM_COME, 1)
    store.set(_key(number), json.dumps(asdict(newcomer)))
    says_so_at = time.monotonic() + _PATIENCE_SECONDS
    while not store.check([_VERDICT]):
        while_waiting()
        _look(store, came)
        now = time.monotonic()
        if now > deadline + _LONGEST_READING_SECONDS:
            raise problem(
                CommunicationError,
                f"MC6205: {place}: a worker ended before it had told the others what it found",
                fix="read the log of that worker, and start all workers again",
            )
        verdict_here = _verdict(came, place, is_over=now > deadline)
        if verdict_here is not None and store.add(_NUM_JUDGES, 1) == 1:  # the first verdict counts
            store.set(_VERDICT, json.dumps(verdict_here))
        elif now > says_so_at:
            says_so_at = now + _PATIENCE_SECONDS
            logger.warning("%s waits for %s", place, numbered("worker", _missing(came, place)))
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    verdict = json.loads(store.get(_VERDICT))
    store.add(_NUM_READ, 1)
    if place.hosts_store:
        _await_readers(store, verdict["num_readers"])
    if number not in verdict["members"] and not verdict["wrong"]:
        raise problem(
            CommunicationError,
            f"MC6205: {newcomer} came when all {place.num_workers} workers had joined",
            "a worker cannot be replaced, and a second job needs another address",
            "end all workers, and start them together",
        )
    if verdict["wrong"]:
        raise problem(CommunicationError, "MC6205: the workers cannot train together", *verdict["wrong"].split(". ", 1))
    _look(store, came)
    return sorted((came[member] for member in verdict["members"]), key=lambda worker: worker.rank)


def _verdict(came: Mapping[int, Worker], place: Place, *, is_over: bool) -> dict[str, Any] | None:
    """The result of joining; None while more workers may come. The store's host waits for ``num_readers`` of it."""
    missing, members = _missing(came, place), sorted(came)
    wrong = disagreement(list(came.values()))
    if wrong or not missing:
        most = max(worker.num_workers for worker in came.values())
        return {"wrong": wrong, "members": members, "num_readers": most}
    if not is_over:
        return None
    they = "it runs, and was" if len(missing) == 1 else "they run, and were"
    late = f"{numbered('worker', missing)} of {place.num_workers} did not come in time"
    late += f". See whether {they} told the same MASTER_ADDR and MASTER_PORT"
    return {"wrong": late, "members": members, "num_readers": 0}


def _missing(came: Mapping[int, Worker], place: Place) -> list[int]:
    return sorted(set(range(place.num_workers)) - {worker.rank for worker in came.values()})


def disagreement(workers: Sequence[Worker]) -> str:
    first, *others = sorted(workers, key=lambda worker: worker.rank) or [Worker(0, 1)]
    taken = {first.rank: first}
    for other in others:
        if other.num_workers != first.num_workers:
            return (
                f"{first} was told that there are {first.num_workers}, {other} that there are {other.num_workers}. Start all "
                "of them with the same WORLD_SIZE"
            )
        if other.rank in taken:
            return f"{taken[other.rank]} and {other} have one rank. Give each its own RANK, and each job its own MASTER_PORT"
        taken[other.rank] = other
        for component, expected in first.versions.items():
            actual = other.versions.get(component)
            if actual != expected:
                return (
                    f"{first} runs {component} {expected}, {other} {component} {actual}. Install the same version on all, as "
                    "each compiles the program for itself"
                )
    return ""


def _key(number: int) -> str:
    return f"worker/{number}"


def _look(store: Any, came: dict[int, Worker]) -> None:
    for number in range(1, store.add(_NUM_COME, 0) + 1):
        if number not in came and store.check([_key(number)]):
            came[number] = Worker(**json.loads(store.get(_key(number))))


def _await_readers(store: Any, num_readers: int) -> None:
    until = time.monotonic() + _LONGEST_READING_SECONDS
    while store.add(_NUM_READ, 0) < max(num_readers, store.add(_NUM_COME, 0)) and time.monotonic() < until:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
