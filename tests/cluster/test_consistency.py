"""Facts that workers compare."""

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from torch import distributed

from mirrorc.cluster import Cluster, Worker
from mirrorc.cluster.consistency import compare, digest
from mirrorc.errors import CommunicationError

WORKERS = tuple(Worker(rank, 3, f"host-{rank}", 100 + rank, {}, "") for rank in range(3))


def compared(
    *given: list[dict[str, Any]], what: tuple[str, ...] = ("the options",) * 3, seconds: float = 60
) -> list[str]:
    store = distributed.HashStore()
    raised = [""] * 3

    def compare(rank: int) -> None:
        cluster = Cluster(rank, 3, 0, WORKERS, store)
        try:
            for facts in given[rank]:
                cluster.check_same(what[rank], facts, timeout_seconds=seconds)
        except CommunicationError as error:
            raised[rank] = str(error)

    threads = [threading.Thread(target=compare, args=(rank,)) for rank in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return raised


def test_equal_facts_pass_as_often_as_they_are_compared() -> None:
    facts = [{"lr": 0.1, "names": ("a", "b")}, {}, {"lr": 0.2}]
    assert compared(facts, list(facts), list(facts)) == [""] * 3


@pytest.mark.parametrize(
    ("facts", "of_worker_1", "expected", "name"),
    [
        ({"a": 1, "lr": 0.1}, {"a": 1, "lr": 0.2}, "lr: 0.1, worker 1 (host-1, process 101) has lr: 0.2", "lr"),
        ({"a": 1}, {"a": 1, "b": 2}, "nothing more, worker 1 (host-1, process 101) has b: 2", "b"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "a: 1, worker 1 (host-1, process 101) has b: 2", "a"),
        ({"a": 1}, {}, "a: 1, worker 1 (host-1, process 101) has nothing more", "a"),
    ],
)
def test_all_raise_the_first_difference(
    facts: dict[str, Any], of_worker_1: dict[str, Any], expected: str, name: str
) -> None:
    raised = compared([{"same": 1}, facts], [{"same": 1}, of_worker_1], [{"same": 1}, {**facts, "more": 1}])
    why = f"MC6301: workers differ in the options\n  why:  worker 0 (host-0, process 100) has {expected}"
    assert raised == [f"{why}\n  fix:  the same {name} on all workers"] * 3


def test_calls_in_another_order_are_told_apart() -> None:
    raised = compared([{}], [{}], [{}], what=("the options", "the options", "the files"))
    assert set(raised) == {raised[0]} and "compares the options, worker 2 (host-2, process 102) the files" in raised[0]


class Shared:
    """A transport between workers that are here."""

    def __init__(self, *texts: str) -> None:
        self.workers, self._texts, self.asked = WORKERS, texts, 0

    def digests(self, topic: str, text: str) -> list[int]:
        return list(map(digest, self._texts))

    def texts(self, topic: str, text: str, ranks: Sequence[int]) -> list[str]:
        self.asked += 1
        return [self._texts[rank] for rank in ranks]


def test_facts_are_sent_only_if_their_digests_differ() -> None:
    same, other = (json.dumps([("", "the options"), ("lr", lr)]) for lr in ("0.1", "0.2"))
    agreeing, differing = Shared(same, same, same), Shared(same, same, other)
    compare("the options", {"lr": 0.1}, over=agreeing)
    assert not agreeing.asked
    with pytest.raises(
        CommunicationError,
        match=r"^MC6301: workers differ in the options\n  why:  worker 0 .* has lr: 0.1, worker 2 .* has lr: 0.2\n"
        r"  fix:  the same lr on all workers$",
    ):
        compare("the options", {"lr": 0.1}, over=differing)


@pytest.mark.slow
def test_who_does_not_come_to_compare_is_named() -> None:
    raised = compared([{}], [], [{}], seconds=0.2)
    late = "MC6203: worker 1 (host-1, process 101) did not come to compare the options with the other workers in time\n  fix:  "
    assert [text[: len(late)] for text in raised] == [late, "", late]
    assert all(text.count("MC6203") == bool(text) for text in raised)


def test_process_on_its_own_has_nothing_to_compare() -> None:
    Cluster().check_same("the options", {"a": 1})
