"""The costs of a gradient, sent whole or as factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mirrorc.analysis.cost.link_speed import LinkSpeed, Messages, ring_all_gather, ring_all_reduce, ring_all_to_all
from mirrorc.ir.links import Link


@dataclass(frozen=True)
class Candidate:
    """A gradient that workers may send as factors.

    Attributes:
        row_bytes: of a row, summed over the factors.
        num_rows: in this worker's first batch.
        work_per_row: multiplications to compute the gradient.
    """

    variable: str
    num_bytes: int
    row_bytes: int
    num_rows: int
    work_per_row: int

    def messages(self, rows: Sequence[int], *, is_dealt: bool) -> tuple[Messages, Messages]:
        """A worker's messages per step, for the whole gradient and for its factors.

        Args:
            rows: by worker; all are padded to the largest number.
            is_dealt: each worker updates a part, so sums are sent once, not nearly twice.
        """
        ring_sum = ring_all_to_all if is_dealt else ring_all_reduce
        return ring_sum(self.num_bytes, len(rows)), ring_all_gather(max(rows) * self.row_bytes, len(rows))

    def is_cheaper_as_factors(
        self, rows: Sequence[int], link: LinkSpeed, seconds_per_multiplication: float, *, is_dealt: bool
    ) -> bool:
        """Compares times, or bytes if the link was not measured.

        With factors, each worker also multiplies rows of other workers.
        """
        whole, factors = self.messages(rows, is_dealt=is_dealt)
        if not link.seconds_per_byte:
            return factors.num_bytes < whole.num_bytes
        made = sum(rows) / len(rows) if is_dealt else sum(rows)
        more_work = (made - min(rows)) * self.work_per_row
        return link.seconds_of(factors) + more_work * seconds_per_multiplication < link.seconds_of(whole)


def bytes_of_sum_received(link: Link, num_bytes: int, num_devices: int) -> float:
    if link.reads_shared_memory:  # each device adds up its share
        return ring_all_to_all(num_bytes, num_devices).num_bytes
    ring = ring_all_reduce if link.moves_by_itself else ring_all_gather  # else each device receives all others' buckets
    return ring(num_bytes, num_devices).num_bytes
