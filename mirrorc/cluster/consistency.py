"""Compares facts between all workers, and names the first worker that differs."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from mirrorc.cluster.membership import Worker
from mirrorc.errors import CommunicationError
from mirrorc.messages.wording import listed

_SECONDS_BETWEEN_LOOKS = 0.02
_LONGEST_READING_SECONDS = 5.0  # for which worker 0, whose store it may be, stays until all have read what they need

Facts = Sequence[tuple[str, str]]


def _nothing() -> None:
    pass


def check_same_facts(
    store: Any,
    workers: Sequence[Worker],
    rank: int,
    topic: str,
    facts: Mapping[str, object],
    deadline: float,
    look: Callable[[], object] = _nothing,
) -> None:
    """Returns if all workers give equal facts in one order; raises the same error in all of them if not.

    Each reads the short digests of all, and if digests differ, the facts of worker 0 and of the first other one.

    Args:
        store: the workers' store; nothing else uses its keys, which are new for each call.
        workers: all, by rank.
        rank: of this worker.
        topic: the subject of the facts, in the plural.
        facts: any printable values, by name.
        deadline: the time, by ``time.monotonic()``, until which the others are awaited.
        look: called now and then meanwhile, to raise an error that ends the wait.

    Raises:
        CommunicationError: the workers differ, or some of them did not come to compare.
    """
    topic_and_facts: Facts = [("", topic), *((name, str(value)) for name, value in facts.items())]
    text = json.dumps(topic_and_facts)
    store.set(f"facts/{rank}", zlib.compress(text.encode()))
    store.set(f"digest/{rank}", hashlib.sha256(text.encode()).hexdigest())
    everyone = range(len(workers))
    late = _await(store, [f"digest/{other}" for other in everyone], deadline, look)
    if late:
        names = listed(workers[other] for other in everyone if f"digest/{other}" in late)
        raise CommunicationError(f"{names} did not come to compare {topic} with the other workers in time")
    digests = [store.get(f"digest/{other}") for other in everyone]
    other = next((other for other in everyone if digests[other] != digests[0]), None)
    difference = ""
    if other is not None:
        shown: list[Facts] = [json.loads(zlib.decompress(store.get(f"facts/{r}"))) for r in (0, other)]
        difference = first_difference(workers[0], shown[0], workers[other], shown[1])
    store.add("read", 1)
    if rank == 0:
        until = min(deadline, time.monotonic() + _LONGEST_READING_SECONDS)
        while store.add("read", 0) < len(workers) and time.monotonic() < until:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    if difference:
        raise CommunicationError(difference)


def all_say(
    store: Any,
    workers: Sequence[Worker],
    rank: int,
    text: str,
    deadline: float,
    look: Callable[[], object] = _nothing,
) -> list[str]:
    """The texts of all workers, by rank.

    Args:
        store, workers, rank, deadline, look: as for `check_same_facts`.
        text: this worker's text.

    Raises:
        CommunicationError: some texts did not come in time.
    """
    store.set(f"said/{rank}", text)
    keys = [f"said/{other}" for other in range(len(workers))]
    late = _await(store, keys, deadline, look)
    if late:
        names = listed(worker for worker, key in zip(workers, keys, strict=True) if key in late)
        raise CommunicationError(f"{names} did not say in time what the other workers wait for")
    return [store.get(key).decode() for key in keys]


def first_difference(first: Worker, facts: Facts, other: Worker, other_facts: Facts) -> str:
    """Describes the first different fact of two workers; empty if there is none. The first fact of each is its topic."""
    topic = facts[0][1]
    for fact, other_fact in zip_longest(map(tuple, facts), map(tuple, other_facts)):
        if fact != other_fact:
            if other_fact is not None and other_fact[0] == "":
                return f"{first} compares {topic}, {other} {other_fact[1]}. Let all workers run the same calls in one order"
            return f"workers differ in {topic}: {first} has {_fact_text(fact)}, {other} has {_fact_text(other_fact)}"
    return ""


def _fact_text(fact: tuple[str, ...] | None) -> str:
    return f"{fact[0]}: {fact[1]}" if fact is not None else "nothing more"


def _await(store: Any, keys: Sequence[str], deadline: float, look: Callable[[], object]) -> list[str]:
    """Waits for all keys until the deadline; returns the missing ones."""
    left = list(keys)
    while True:
        left = [key for key in left if not store.check([key])]
        if not left or time.monotonic() > deadline:
            return left
        look()
        time.sleep(_SECONDS_BETWEEN_LOOKS)
