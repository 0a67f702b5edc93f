"""Shares that are made behind the commit, right before an update takes them, as in a step that looks at nothing.

To make a share, to look at it, and to read it from memory again when all have been looked at, costs a small batch's step a few
percent. What is asked before the commit, the norm of all or whether all are finite, mostly follows from the factors of products
and from the rows that are added to tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.buckets.clipping import asked_of_late_share
from mirrorc.analysis.gradients.tiled_updates import is_bounded_by_factors, is_measured_by_factors
from mirrorc.ir import ops
from mirrorc.runtime.communication import Communicator
from mirrorc.runtime.execution.commit.part_visitors import Visitor, visit_of_all
from mirrorc.runtime.state.shares.lazy_pieces import UnmadePieces, are_finite, norm_of_unmade
from mirrorc.runtime.state.shares.pieces import Leaves


class LateShare:
    """What a wait has left unmade of a replica's share."""

    def __init__(self) -> None:
        self._unmade: UnmadePieces | None = None
        self._are_finite = False  # whether what is left is known to be

    def leave(self, unmade: UnmadePieces | None) -> None:
        """Takes what is left; None for nothing."""
        self._unmade, self._are_finite = unmade, False

    def forget(self) -> None:
        """Drops what no update of the step will take, so that its factors are freed."""
        self._unmade = None

    def make(self) -> None:
        """Makes what is left."""
        if self._unmade is not None:
            self._unmade.make()
            self._unmade = None

    def take_in_parts(self, num_elements: int) -> UnmadePieces | None:
        """Gives what is left, if it can be made in parts of so many elements; then it is left to the caller."""
        if self._unmade is None or not self._unmade.largest_part(num_elements):
            return None
        unmade, self._unmade = self._unmade, None
        return unmade

    def make_visited(self) -> None:
        """Makes what is left, and has it visited as if the wait had made it."""
        if self._unmade is not None:
            self._unmade.make_visited()
            self._unmade = None

    def make_scaled(self, factor: float) -> bool:
        """Makes what is left times a finite factor, and multiplies the rest, if that costs less than to scale the share; returns
        whether it has."""
        if self._unmade is None or not self._unmade.rest_is_small:
            return False
        self._unmade.make_scaled(factor)
        self._unmade = None
        return True

    @staticmethod
    def measure(shares: Sequence[LateShare]) -> float | None:
        """The 2-norm of all that is left, or None if nothing is. What cannot be measured exactly is made and visited."""
        unmade = [share._unmade for share in shares if share._unmade is not None]
        norm = norm_of_unmade(unmade) if unmade else None
        for share in shares:
            if norm is None:
                share.make_visited()
            share._are_finite = True
        return norm

    @staticmethod
    def settle(shares: Iterable[LateShare]) -> None:
        """Leaves only what is finite: makes and visits what is left, unless all of it is known to be finite."""
        open_ones = [share for share in shares if share._unmade is not None and not share._are_finite]
        if open_ones and not are_finite([share._unmade for share in open_ones if share._unmade is not None]):
            for share in open_ones:
                share.make_visited()


def what_is_left(wait: fx.Node) -> Leaves | None:
    """Says which products of a share may be made when an update takes it: those of which enough is known by their factors.
    None if all of the share is made at once."""
    asked = asked_of_late_share(wait)
    if asked is None:
        return None
    return is_measured_by_factors if asked is ops.norm else is_bounded_by_factors


def leaving(
    communicator: Communicator, bucket: int, replica: int, visitors: Sequence[Visitor], leaves: Leaves, late: LateShare
) -> Callable[..., torch.Tensor]:
    """As `mirrorc.runtime.execution.commit.part_visitors.visiting`, for a share of which something may be left."""
    visit = visit_of_all(visitors)

    def wait(pending: Any, **_: Any) -> torch.Tensor:
        for visitor in visitors:
            visitor.begin()
        share, unmade = communicator.wait_and_leave(bucket, replica, pending, visit, leaves)
        late.leave(unmade)
        return share

    return wait
