"""Finds the gradients that are sent when backward has ended, in the order in which the next forward needs their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program
from mirrorc.ir.variables import SHARE_ELEMENTS, Variable

LEAST_PART = 16
"""Less than this part of a cap is not worth a message of its own."""

_NUM_BUCKETS = 4  # of whole late gradients, about


@dataclass(frozen=True)
class LateGradients:
    """The gradients that come last in backward, up to a third of all bytes, and what remains of that third.

    Attributes:
        num_bytes: of each of them, by name.
        across: the name of the gradient across the bound of that third, if it is cut there; empty if none is.
        num_early: how many elements of it are sent while backward goes on.
    """

    num_bytes: Mapping[str, int]
    across: str = ""
    num_early: int = 0

    @property
    def cap(self) -> float:
        """The bytes of a bucket at which the next one is opened."""
        return sum(self.num_bytes.values()) / _NUM_BUCKETS

    def holds(self, bucket: Bucket) -> bool:
        """Whether a bucket's gradients are whole late ones; the first of them opens a bucket."""
        return bucket.slots[0].variable in self.num_bytes

    def sorted_by_need(self, program: Program, closed: Sequence[list[Variable]]) -> list[list[Variable]]:
        """The members of buckets: early ones first, as they are, then late ones in the order in which forward reads them."""
        first = _first_reads(program)
        early = [members for members in closed if members[0].name not in self.num_bytes]
        late = [members for members in closed if members[0].name in self.num_bytes]
        return [*early, *sorted(late, key=lambda members: min(first[member.name] for member in members))]

    def ranges(self, program: Program, buckets: Sequence[Bucket]) -> list[tuple[int, tuple[int, int]]]:
        """What is sent at a time, in its order, if a gradient is cut: the number of a bucket, and its elements."""
        first = _first_reads(program)
        found = []  # whether it is late, when it is sent among these, its bucket, its elements
        for bucket in buckets:
            own = bucket.slot_of.get(self.across)
            bound = own.offset + self.num_early if own is not None else 0
            if own is not None:
                found.append((False, bucket.index, bucket.index, (0, bound)))
            is_late = own is not None or self.holds(bucket)
            need = first[self.across] if own is not None else min(first[slot.variable] for slot in bucket.slots)
            found.append((is_late, need if is_late else bucket.index, bucket.index, (bound, bucket.num_elements)))
        return [(index, elements) for *_, index, elements in sorted(found)]


def last_third(sizes: Mapping[str, int], cap: float, divisible: Mapping[str, int]) -> LateGradients:
    """The gradients of the last third of all bytes, of which there is one at least.

    Args:
        sizes: the bytes of all gradients, in the order in which backward makes them.
        cap: the bytes above which one is cut at the bound of that third.
        divisible: the bytes of an element of those that may be cut.
    """
    third, least = sum(sizes.values()) / 3, cap / LEAST_PART
    found: dict[str, int] = {}
    for name in reversed(list(sizes)):
        rest = third - sum(found.values())
        if not found or sizes[name] <= rest:
            found[name] = sizes[name]
            continue
        if sizes[name] > cap and rest >= least and name in divisible:
            num_early = int((sizes[name] - rest) / divisible[name]) // SHARE_ELEMENTS * SHARE_ELEMENTS
            if num_early and num_early * divisible[name] >= least:
                return LateGradients(found, name, num_early)
        break
    return LateGradients(found)


def _first_reads(program: Program) -> dict[str, int]:
    """The place in the graph of the first operator that takes each variable."""
    graph = program.shard_graphs[0]
    place = {node: i for i, node in enumerate(graph.nodes)}
    return {
        str(read.kwargs["variable"]): min((place[user] for user in read.users), default=len(place))
        for read in calls_to(graph, ops.read)
    }
