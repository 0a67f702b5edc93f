"""Messages have all rows of a worker's factors, whatever their numbers, and workers tell each other these once."""

from collections.abc import Callable
from typing import Any

import torch

from mirrorc.analysis.gradients.sent_factors import split_counts
from mirrorc.ir.buckets import RowType, SentFactors
from mirrorc.runtime.workers.buckets.exchanges import FactorMessage, Gathering
from mirrorc.runtime.workers.protocol.header import Header, KnownCounts

F64 = torch.float64
MESSAGE = FactorMessage(
    [
        SentFactors("product", (RowType((3,), F64), RowType((5,), F64))),
        SentFactors("index_add", (RowType((2,), F64), RowType((), torch.int64))),
    ]
)
COUNTS = [(1, 2, 1, 4, 2, 1, 0, 1, 3), (1, 1, 0, 1, 2, 0)]  # of two workers with two replicas; one has no examples


def factors(counts: tuple[int, ...], places: tuple[int, ...]) -> list[Any]:
    lefts = [(torch.randn(n, 3, dtype=F64).t(), torch.randn(n, 5, dtype=F64)) for n in counts]
    rows = [(torch.randn(n, 2, dtype=F64), torch.arange(n)) for n in places]
    return [lefts, rows]


def test_what_is_sent_is_read() -> None:
    split = [split_counts(counts, [2], 2)[0] for counts in COUNTS]
    assert split == [[[(2,), (4,)], [(1, 0), (3,)]], [[(1,), ()], [(2,), ()]]]
    sent = [[factors((2,), (1, 0)), factors((4,), (3,))], [factors((1,), (2,)), []]]
    gatherings = [Gathering(MESSAGE, split, rank, own) for rank, own in enumerate(sent)]
    for one in gatherings:
        for rank, other in enumerate(gatherings):
            one.gathered[rank] = other.message
    for one in gatherings:
        expected = [own for worker in sent for own in worker]
        assert [len(own) for own in one.replicas] == [len(own) for own in expected] == [2, 2, 2, 0]
        for own, found in zip(expected, one.replicas, strict=True):
            torch.testing.assert_close(found, own, rtol=0, atol=0)
            assert all(t.data_ptr() % 64 == 0 for parts in found for part in parts for t in part if t.numel())


def test_counts_are_told_once() -> None:
    """Until one of them is new, or one worker knows others than another one."""
    workers, messages = [KnownCounts(), KnownCounts()], 0

    def step(*counts: tuple[int, ...]) -> list[Any]:
        nonlocal messages
        plain = Header(1, 0, 0, 0, 0, 0, 0, 4, 1, 0)
        headers = [own.noted_in(plain, one) for own, one in zip(workers, counts, strict=True)]
        padded: list[torch.Tensor] = []

        def offer(launch: Callable[[Any], Any]) -> None:
            launch(type("Group", (), {"all_gather": lambda _, own, into: padded.append(own)})())

        for own, one in zip(workers, counts, strict=True):  # what each would send
            probe = KnownCounts()
            probe._by_digest = dict(own._by_digest)
            probe.of_all(headers, one, offer)
        messages += bool(padded)

        def gather(launch: Callable[[Any], Any]) -> None:
            def all_gather(_: Any, own: torch.Tensor, into: list[torch.Tensor]) -> None:
                for place, message in zip(into, padded, strict=True):
                    place.copy_(message)

            launch(type("Group", (), {"all_gather": all_gather})())

        return [own.of_all(headers, one, gather) for own, one in zip(workers, counts, strict=True)]

    for counts, expected in (((1, 2), (1, 3, 4, 5)), 1), (((1, 2), (1, 3, 4, 5)), 1), (((1, 2), (1, 7)), 2):
        assert step(*counts) == [list(counts)] * 2
        assert messages == expected
    workers[0] = KnownCounts()  # it did not end a call
    assert step((1, 2), (1, 7)) == [[(1, 2), (1, 7)]] * 2 and messages == 3
    assert step((1, 2), (1, 3, 4, 5)) == [[(1, 2), (1, 3, 4, 5)]] * 2 and messages == 4
    assert step((1, 2), (1, 7)) == [[(1, 2), (1, 7)]] * 2 and messages == 4
