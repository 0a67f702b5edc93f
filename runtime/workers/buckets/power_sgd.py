"""A pack whose matrices workers add up with low rank: what they send of it, and the sum that each makes of that."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mirrorc.ir.buckets import Matrix
from mirrorc.runtime.state.gradients.low_rank_products import subtract_product, write_elements, write_product
from mirrorc.runtime.state.gradients.orthonormalize import orthonormal_columns
from mirrorc.runtime.workers.transport.lane import SeveralRounds
from mirrorc.torch_internals import GlooGroup


class WholeSum:
    """A pack that workers add up whole, in a copy: every device takes from that, while the first makes the pack zero. It is a
    `SentPart`.

    Args:
        whole: the pack, 1-D, with what was not sent before.
    """

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole

    def launch(self, group: GlooGroup) -> Any:
        """Launches the collective of it; gives a work."""
        self._sum = self._whole.clone()
        return group.all_reduce(self._sum)

    def take(self, start: int, stop: int, into: torch.Tensor, *, keeps_rest: bool) -> None:
        """Writes these elements of the sum into memory; if it ``keeps_rest``, what was not sent of them replaces them in the
        pack."""
        into.copy_(self._sum[start:stop])
        if keeps_rest:
            self._whole[start:stop].zero_()


class LowRankSum(WholeSum, SeveralRounds):
    """A pack of whose matrices workers send factors: of each matrix M first ``P = M Q``, then ``Q = P' M``.

    The lane's thread makes the second factors between the two rounds. What is not in a matrix is sent whole in the first round.
    All workers make the same bits of the sum: element by element, or by the library's products, where these have the same bits on
    all workers.

    Args:
        whole: the pack, 1-D, of float32 or float64, with what was not sent before.
        matrices: those of which factors are sent.
        begin: for each of them, the Q [columns, rank] with which it begins, whose columns are orthonormal.
        keep: is given the right factors of the sum, by variable, when it is there.
        by_library: whether the library makes the sum.
    """

    def __init__(
        self,
        whole: torch.Tensor,
        matrices: Sequence[Matrix],
        begin: Sequence[torch.Tensor],
        keep: Callable[[Mapping[str, torch.Tensor]], object],
        *,
        by_library: bool,
    ) -> None:
        super().__init__(whole)
        self._write = write_product if by_library else write_elements
        self._matrices, self._rank, self._keep = matrices, begin[0].shape[1], keep
        self._views = [whole[one.start : one.stop].view(one.rows, one.columns) for one in matrices]
        self._rest = list(_between(matrices, whole.numel()))
        length = sum(stop - start for start, stop in self._rest)
        self._left = whole.new_empty(self._rank * sum(one.rows for one in matrices) + length)
        for view, factor, made in zip(self._views, begin, self._lefts(), strict=True):
            torch.mm(view, factor, out=made)
        for (start, stop), sent in zip(self._rest, self._sent_whole(), strict=True):
            sent.copy_(whole[start:stop])

    def launch(self, group: GlooGroup) -> Any:
        """See the base class; whoever waits for the work launches the second round."""
        self._group, self._first_round = group, group.all_reduce(self._left)
        return self

    def wait(self) -> None:
        """Waits for the first round, and makes and awaits the second one; in the lane's thread."""
        self._first_round.wait()
        self._bases = orthonormal_columns(self._lefts())
        right = self._left.new_empty(self._rank * sum(one.columns for one in self._matrices))
        sizes = [self._rank * one.columns for one in self._matrices]
        rights = [
            flat.view(one.columns, self._rank) for one, flat in zip(self._matrices, right.split(sizes), strict=True)
        ]
        for view, base, made in zip(self._views, self._bases, rights, strict=True):
            torch.mm(view.T, base, out=made)
        self._own = [made.clone() for made in rights]
        self._group.all_reduce(right).wait()
        self._rights = rights
        self._keep({one.variable: made for one, made in zip(self._matrices, rights, strict=True)})

    def take(self, start: int, stop: int, into: torch.Tensor, *, keeps_rest: bool) -> None:
        """See the base class."""
        for (first, last), sent in zip(self._rest, self._sent_whole(), strict=True):
            begin, end = max(first, start), min(last, stop)
            if begin < end:
                into[begin - start : end - start].copy_(sent[begin - first : end - first])
                if keeps_rest:
                    self._whole[begin:end].zero_()
        made = zip(self._matrices, self._views, self._bases, self._rights, self._own, strict=True)
        for one, view, base, of_all, own in made:
            begin, end = max(one.start, start), min(one.stop, stop)
            if begin >= end:
                continue
            self._write(into[begin - start : end - start], base, of_all, begin - one.start)
            if keeps_rest:
                subtract_product(view, base, own, begin - one.start, end - one.start)

    def _lefts(self) -> list[torch.Tensor]:
        """The left factors, [rows, rank] each, in the message."""
        sizes = [self._rank * one.rows for one in self._matrices]
        flats = self._left[: sum(sizes)].split(sizes)
        return [flat.view(one.rows, self._rank) for one, flat in zip(self._matrices, flats, strict=True)]

    def _sent_whole(self) -> Sequence[torch.Tensor]:
        """What is sent as it is, in the message behind the left factors."""
        sizes = [stop - start for start, stop in self._rest]
        return self._left[self._left.numel() - sum(sizes) :].split(sizes)


def _between(matrices: Sequence[Matrix], num_elements: int) -> Iterator[tuple[int, int]]:
    """The elements of a pack that are in none of the matrices, as ranges."""
    bounds = [0, *itertools.chain(*((one.start, one.stop) for one in matrices)), num_elements]
    return ((start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop)
