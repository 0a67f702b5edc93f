"""Compares facts between workers."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol

from mirrorc.cluster.membership import Worker
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import message, problem
from mirrorc.messages.wording import listed

_SECONDS_BETWEEN_LOOKS = 0.02
_LONGEST_READING_SECONDS = 5.0  # at most, worker 0 waits for all to read: it may host the store
_DIGEST_BITS = 63

Facts = Sequence[tuple[str, str]]


def digest(text: str) -> int:
    """A hash in the range of int64, equal in all processes."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> (64 - _DIGEST_BITS)


class Transport(Protocol):
    """Exchanges facts between workers. All workers call its methods in the same order."""

    @property
    def workers(self) -> Sequence[Worker]: ...

    def digests(self, topic: str, text: str) -> Sequence[int]:
        """Digests of all workers' texts, by rank."""
        ...

    def texts(self, topic: str, text: str, ranks: Sequence[int]) -> list[str]:
        """Called only if digests differ."""
        ...


def compare(topic: str, facts: Mapping[str, object], *, over: Transport, remedy: str = "") -> None:
    """Raises the same CommunicationError in all workers if their facts, or the facts' order, differ."""
    text = json.dumps([("", topic), *((name, str(value)) for name, value in facts.items())])
    digests = over.digests(topic, text)
    other = next((rank for rank, other_digest in enumerate(digests) if other_digest != digests[0]), None)
    if other is not None:
        first_facts, other_facts = map(json.loads, over.texts(topic, text, (0, other)))
        difference = first_difference(over.workers[0], first_facts, over.workers[other], other_facts, remedy)
        raise CommunicationError(difference)


class StoreTransport:
    """Exchanges facts under a prefix of a store, one for each comparison. ``look`` is polled; its error ends the wait."""

    def __init__(
        self, store: Any, workers: Sequence[Worker], rank: int, deadline: float, look: Callable[[], object]
    ) -> None:
        self.workers: Sequence[Worker] = workers
        self._store, self._rank, self._deadline, self._look = store, rank, deadline, look

    def digests(self, topic: str, text: str) -> Sequence[int]:
        self._store.set(f"facts/{self._rank}", zlib.compress(text.encode()))
        self._store.set(f"digest/{self._rank}", str(digest(text)))
        fault = f"did not come to compare {topic} with the other workers in time"
        digests = [*map(int, self._texts_of_all("digest", fault))]
        if len(set(digests)) == 1:
            self._await_readers()
        return digests

    def texts(self, topic: str, text: str, ranks: Sequence[int]) -> list[str]:
        texts = [zlib.decompress(self._store.get(f"facts/{rank}")).decode() for rank in ranks]
        self._await_readers()
        return texts

    def all_say(self, text: str) -> list[str]:
        self._store.set(f"said/{self._rank}", text)
        return self._texts_of_all("said", "did not answer in time", "all workers make this call together")

    def _texts_of_all(self, prefix: str, fault: str, why: str = "") -> list[str]:
        """Waits for a text of each worker under ``prefix``. ``fault`` says what late workers did not do."""
        keys = missing = [f"{prefix}/{rank}" for rank in range(len(self.workers))]
        while missing := [key for key in missing if not self._store.check([key])]:
            if time.monotonic() > self._deadline:
                names = listed(worker for worker, key in zip(self.workers, keys, strict=True) if key in missing)
                fix = (
                    "read the log of that worker: it has ended, hangs or is slow",
                    "communication=mirrorc.Communication(timeout=3600), to wait an hour",
                )
                raise problem(CommunicationError, f"MC6203: {names} {fault}", why, fix)
            self._look()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        return [self._store.get(key).decode() for key in keys]

    def _await_readers(self) -> None:
        self._store.add("read", 1)
        if self._rank == 0:
            until = min(self._deadline, time.monotonic() + _LONGEST_READING_SECONDS)
            while self._store.add("read", 0) < len(self.workers) and time.monotonic() < until:
                time.sleep(_SECONDS_BETWEEN_LOOKS)


def first_difference(first: Worker, facts: Facts, other: Worker, other_facts: Facts, remedy: str = "") -> str:
    """Describes the first difference between two workers' facts; empty if equal. The first fact is the topic."""
    topic = facts[0][1]
    for fact, other_fact in zip_longest(map(tuple, facts), map(tuple, other_facts)):
        if fact != other_fact:
            if other_fact is not None and other_fact[0] == "":
                fix = "make the same calls in one order, on all workers"
                return message(f"MC6301: {first} compares {topic}, {other} {other_fact[1]}", fix=fix)
            why = f"{first} has {_fact_text(fact)}, {other} has {_fact_text(other_fact)}"
            name = (fact or other_fact or ("facts",))[0]
            return message(f"MC6301: workers differ in {topic}", why, remedy or f"the same {name} on all workers")
    return ""


def _fact_text(fact: tuple[str, ...] | None) -> str:
    return f"{fact[0]}: {fact[1]}" if fact is not None else "nothing more"
