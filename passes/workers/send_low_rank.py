"""Has workers send thin factors of gradients that are matrices, which changes numbers; for those who ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from mirrorc.analysis.communication.compressed_sums import low_rank_matrices, num_bytes_sent
from mirrorc.ir import ops
from mirrorc.ir.buckets import Matrix, matrices_in
from mirrorc.ir.nodes import bucket_of, pack_of
from mirrorc.ir.program import Program
from mirrorc.messages.wording import counted, listed
from mirrorc.passes.workers.worker_compression import WorkerCompression, others_than, said_of_ring, send_part
from mirrorc.power_sgd import PowerSGD

_MOST_NAMED = 100  # gradients in a remark


@dataclass(frozen=True)
class SendLowRank(WorkerCompression):
    """Has workers send two thin factors of each matrix of a bucket, and the rest of the bucket whole::

        x_0     = exchange(sum_0, bucket=0, op=sum)           own_0   = add_unsent(sum_0, bucket=0, replica=0)
        commit(early=True, replica=0)                         x_0     = exchange_low_rank(own_0, rank=4, matrices=('1.weight',),
        total_0 = wait(x_0, bucket=0, replica=0)        ->                start_step=0, seed=0, by_library=True, bucket=0, op=sum)
        update(total_0, bucket=0, replica=0)                  commit(early=True, replica=0)
                                                              total_0 = wait(x_0, bucket=0, replica=0)
                                                              update(total_0, bucket=0, replica=0)

    A worker's devices add up their gradients first, each its share, and what a worker has accumulated is in that sum. To it is
    added what the worker has not sent in earlier steps. Of that matrix M, the workers send ``P = M Q`` and ``Q = P' M``, as
    `mirrorc.PowerSGD` says; each keeps ``M - P Q'`` with its own Q. So over all steps each worker sends its gradients' sum but
    for what it still keeps. Norms, bounds, checks and the optimizer take the sum over workers of ``P Q'``. What is not a number,
    or infinite, on any worker makes the whole matrix so on all. The library makes that product where it has the same bits on all
    workers (`mirrorc.ir.workers.Workers.multiply_alike`); elsewhere it is made element by element.

    A matrix is sent so if its factors are shorter, by `mirrorc.PowerSGD.min_compression_rate` at least. It must lie in one pack,
    and have the dtype float32 or float64. All other gradients of its bucket are sent whole in the message of the left factors;
    buckets without such a matrix are sent as they are. So are factors, of which each worker makes its gradients.

    Needs, guarantees: see the base class.

    Attributes:
        rank, min_compression_rate, start_step, seed: see `mirrorc.PowerSGD`.
    """

    rank: int = 1
    min_compression_rate: float = 2.0
    start_step: int = 0
    seed: int = 0
    name: str = field(default="send-low-rank", init=False, repr=False)
    changes_bits: str = field(
        default="workers send matrices of low rank, and the rest in later steps", init=False, repr=False
    )
    does: ClassVar = "sends factors of"

    def __post_init__(self) -> None:
        _ = self.option  # refuses what cannot be asked for

    @property
    def option(self) -> PowerSGD:
        """What asks for this pass."""
        return PowerSGD(self.rank, self.min_compression_rate, self.start_step, self.seed)

    def num_elements_sent(self, rows: int, columns: int, dtype: torch.dtype) -> int:
        """The elements that are sent of a gradient that is a matrix of this size."""
        is_short = _can_be_made(dtype) and self.option.shortens(rows, columns)
        return self.rank * (rows + columns) if is_short else rows * columns

    def applies_to(self, program: Program, launch: fx.Node) -> bool:
        """See the base class."""
        return bool(self._chosen(program, pack_of(launch)))

    def _chosen(self, program: Program, number: int) -> list[Matrix]:
        bucket, pack = program.packs[number]
        found = matrices_in(bucket, pack) if _can_be_made(bucket.dtype) else []
        return [one for one in found if self.option.shortens(one.rows, one.columns)]

    def replace(self, program: Program, launch: fx.Node) -> fx.Node:
        """See the base class."""
        names = tuple(one.variable for one in self._chosen(program, pack_of(launch)))
        words = {
            "rank": self.rank,
            "matrices": names,
            "start_step": self.start_step,
            "seed": self.seed,
            "by_library": program.workers.multiply_alike,
        }
        return send_part(program, launch, ops.exchange_low_rank, words)

    def remarks(self, program: Program, new: Sequence[fx.Node], before: int) -> list[str]:
        """See the base class."""
        told = []
        if new:
            after = sum(num_bytes_sent(program, launch) for launch in new)
            starts = f", after {counted(self.start_step, 'step')} of whole sums" if self.start_step else ""
            told.append(
                f"{counted(len(new), 'exchange')} of rank {self.rank}{starts}, which changes numbers: each of "
                f"{program.workers.num_workers} workers sends {said_of_ring(program, after)} in a step, in place of "
                f"{said_of_ring(program, before)}"
            )
            told.append(self._said_of_gradients(program, new))
        if others := others_than(program, new):
            told.append(
                f"{others} not of rank {self.rank}: no matrix in it is large enough for that, or it is sent as factors that make "
                "the exact sum"
            )
        return told

    def _said_of_gradients(self, program: Program, new: Sequence[fx.Node]) -> str:
        """Which gradients are sent as factors, and which whole and why, of the buckets of which some are."""
        short = [one for launch in new for one in low_rank_matrices(program, launch)]
        sizes = [
            f"{one.variable} ({one.rows} x {one.columns}, {self.rank * one.sides} of {one.rows * one.columns} elements)"
            for one in short
        ]
        names = {one.variable for one in short}
        whole = []
        for index in sorted({bucket_of(launch) for launch in new}):
            bucket = program.buckets[index]
            lie_whole = {one.variable for pack in bucket.own_packs for one in matrices_in(bucket, pack)}
            for slot in bucket.slots:
                if slot.variable not in names:
                    thin = "its factors are too long" if slot.variable in lie_whole else "no matrix in one pack"
                    whole.append(f"{slot.variable} ({thin})")
        rest = f"; whole beside them: {listed(whole, _MOST_NAMED)}" if whole else ""
        return f"of rank {self.rank}: {listed(sizes, _MOST_NAMED)}{rest}"


def _can_be_made(dtype: torch.dtype) -> bool:
    """Whether factors of this dtype are made."""
    return dtype in (torch.float32, torch.float64)
