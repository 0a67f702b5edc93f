"""Selects the gradients to send after backward, in the order in which the next forward needs their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program
from mirrorc.ir.variables import SHARE_ELEMENTS, Variable

LEAST_PART = 16
"""A smaller part of a cap is not worth a separate message."""

_NUM_BUCKETS = 4  # of whole late gradients, about


@dataclass(frozen=True)
class LateGradients:
    """The last gradients of backward, up to a third of all bytes, and the rest of that third.

    Attributes:
        num_bytes: the bytes of each gradient, by name.
        across: the gradient that is cut at the bound of that third; empty if none is.
        num_early: the number of its elements sent during backward.
    """

    num_bytes: Mapping[str, int]
    across: str = ""
    num_early: int = 0

    @property
    def cap(self) -> float:
        """The bytes of a bucket at which the next one is opened."""
        return sum(self.num_bytes.values()) / _NUM_BUCKETS

    def holds(self, bucket: Bucket) -> bool:
        """True if a bucket has whole late gradients; the first of them opens a bucket."""
        return bucket.slots[0].variable in self.num_bytes

    def sorted_by_need(self, program: Program, closed: Sequence[list[Variable]]) -> list[list[Variable]]:
        """The members of buckets: early ones first, unchanged, then late ones in the order in which forward reads them."""
        first = _first_reads(program)
        early = [members for members in closed if members[0].name not in self.num_bytes]
        late = [members for members in closed if members[0].name in self.num_bytes]
        return [*early, *sorted(late, key=lambda members: min(first[member.name] for member in members))]

    def ranges(self, program: Program, buckets: Sequence[Bucket]) -> list[tuple[int, tuple[int, int]]]:
        """The ranges to send, in order, if a gradient is cut: a bucket's number and its elements."""
        first = _first_reads(program)
        order = []  # whether it is late, when it is sent among these, its bucket, its elements
        for bucket in buckets:
            slot_across = bucket.slot_of.get(self.across)
            bound = slot_across.offset + self.num_early if slot_across is not None else 0
            if slot_across is not None:
                order.append((False, bucket.index, bucket.index, (0, bound)))
            is_late = slot_across is not None or self.holds(bucket)
            need = first[self.across] if slot_across is not None else min(first[slot.variable] for slot in bucket.slots)
            order.append((is_late, need if is_late else bucket.index, bucket.index, (bound, bucket.num_elements)))
        return [(index, elements) for *_, index, elements in sorted(order)]


def last_third(sizes: Mapping[str, int], cap: float, divisible: Mapping[str, int]) -> LateGradients:
    """The gradients of the last third of all bytes, at least one.

    Args:
        sizes: the bytes of all gradients, in the order of backward.
        cap: larger gradients, in bytes, are cut at the bound of that third.
        divisible: the bytes of an element of gradients that may be cut.
    """
    third, least = sum(sizes.values()) / 3, cap / LEAST_PART
    late: dict[str, int] = {}
    for name in reversed(list(sizes)):
        rest = third - sum(late.values())
        if not late or sizes[name] <= rest:
            late[name] = sizes[name]
            continue
        if sizes[name] > cap and rest >= least and name in divisible:
            num_early = int((sizes[name] - rest) / divisible[name]) // SHARE_ELEMENTS * SHARE_ELEMENTS
            if num_early and num_early * divisible[name] >= least:
                return LateGradients(late, name, num_early)
        break
    return LateGradients(late)


def _first_reads(program: Program) -> dict[str, int]:
    """The place in the graph of the first operator that takes each variable."""
    graph = program.shard_graphs[0]
    place = {node: i for i, node in enumerate(graph.nodes)}
    return {
        str(read.kwargs["variable"]): min((place[user] for user in read.users), default=len(place))
        for read in calls_to(graph, ops.read)
    }
