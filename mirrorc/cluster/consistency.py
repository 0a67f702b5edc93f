"""Whether all workers say the same of something, and who first says something else."""

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
    what: str,
    facts: Mapping[str, object],
    deadline: float,
    look: Callable[[], object] = _nothing,
) -> None:
    """Returns if all workers give equal facts in one order; raises the same error in all of them if not.

    Each reads the digests of all, which are short, and where digests differ, the facts of worker 0 and of the first other one.

    Args:
        store: where the workers meet; nothing else uses its keys, which are new for each call.
        workers: all, by rank.
        rank: of this worker.
        what: what the facts are of, in the plural.
        facts: any texts or values that can be shown, by name.
        deadline: the time, by ``time.monotonic()``, until which the others are awaited.
        look: called now and then while they are, to raise what ends that.

    Raises:
        CommunicationError: the workers differ, or some of them did not come to compare.
    """
    own: Facts = [("", what), *((name, str(value)) for name, value in facts.items())]
    text = json.dumps(own)
    store.set(f"facts/{rank}", zlib.compress(text.encode()))
    store.set(f"digest/{rank}", hashlib.sha256(text.encode()).hexdigest())
    everyone = range(len(workers))
    late = _await(store, [f"digest/{other}" for other in everyone], deadline, look)
    if late:
        names = listed(workers[other] for other in everyone if f"digest/{other}" in late)
        raise CommunicationError(f"{names} did not come to compare {what} with the other workers in time")
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
    """What each worker says, by rank.

    Args:
        store, workers, rank, deadline, look: as for `check_same_facts`.
        text: what this one says.

    Raises:
        CommunicationError: some of them said nothing in time.
    """
    store.set(f"said/{rank}", text)
    keys = [f"said/{other}" for other in range(len(workers))]
    late = _await(store, keys, deadline, look)
    if late:
        names = listed(worker for worker, key in zip(workers, keys, strict=True) if key in late)
        raise CommunicationError(f"{names} did not say in time what the other workers wait for")
    return [store.get(key).decode() for key in keys]


def first_difference(one: Worker, facts: Facts, other: Worker, others_facts: Facts) -> str:
    """Says in which fact two workers differ first; an empty text if in none. The first fact of each is what they compare."""
    what = facts[0][1]
    for own, others in zip_longest(map(tuple, facts), map(tuple, others_facts)):
        if own != others:
            if others is not None and others[0] == "":
                return f"{one} compares {what}, {other} {others[1]}. Let all workers run the same calls in one order"
            return f"workers differ in {what}: {one} has {_said(own)}, {other} has {_said(others)}"
    return ""


def _said(fact: tuple[str, ...] | None) -> str:
    return f"{fact[0]}: {fact[1]}" if fact is not None else "nothing more"


def _await(store: Any, keys: Sequence[str], deadline: float, look: Callable[[], object]) -> list[str]:
    """Returns when all keys are there, or the time is over: those that are not."""
    left = list(keys)
    while True:
        left = [key for key in left if not store.check([key])]
        if not left or time.monotonic() > deadline:
            return left
        look()
        time.sleep(_SECONDS_BETWEEN_LOOKS)
