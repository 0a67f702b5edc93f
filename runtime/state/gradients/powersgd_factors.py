"""The right factors of sums of low rank, with which the next step begins, and how many steps there were."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from mirrorc.runtime.state.gradients.orthonormalize import orthonormal_columns


@dataclass(frozen=True)
class _Now:
    """What is kept.

    Attributes:
        kept: by variable.
        num_steps: see `KeptFactors`.
        are_made: whether the step that runs makes others.
    """

    kept: dict[str, torch.Tensor]
    num_steps: int
    are_made: bool = False


class KeptFactors:
    """What steps that send matrices of low rank leave to the next one; all workers have the same.

    A step that fails, or leaves its update out, changes nothing.

    Attributes:
        num_steps: how many such steps have taken place, those that sent whole sums before included.
        new: what the step that runs leaves, by variable: [columns, rank], as workers have added it up. What it does not make
            stays as it was.
    """

    def __init__(self, kept: Mapping[str, torch.Tensor] | None = None, num_steps: int = 0) -> None:
        self._now = _Now(dict(kept or {}), num_steps)
        self.new: dict[str, torch.Tensor] = {}

    @property
    def num_steps(self) -> int:
        """See the class."""
        return self._now.num_steps

    def begin(self, *, are_made: bool) -> None:
        """Called before a step; ``are_made``: whether it sends matrices of low rank. Of a step before that has not taken place,
        nothing is left."""
        self.new, self._now = dict(self._now.kept), replace(self._now, are_made=are_made)

    def begin_with(self, variable: str, columns: int, rank: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
        """The factor [columns, rank] with which a matrix begins; its columns are orthonormal.

        It is that of the step before. What that has not, as its rank was lower, or gradients did not need it, is that of the
        first step.
        """
        kept = self._now.kept.get(variable)
        if kept is None or kept.shape[0] != columns:
            return orthonormal_columns([_drawn(variable, columns, rank, seed)])[0].to(dtype)
        kept = kept[:, :rank].double()
        is_there = (kept != 0).any(0)
        if kept.shape[1] < rank or not bool(is_there.all()):
            found = _drawn(variable, columns, rank, seed)
            found[:, : kept.shape[1]] = torch.where(is_there, kept, found[:, : kept.shape[1]])
            kept = found
        return torch.linalg.qr(kept).Q.to(dtype)

    def finish(self) -> None:
        """Called when the step has taken place. May be repeated. Sums that are in flight then are put into what is kept."""
        if self._now.are_made:
            self._now = _Now(self.new, self._now.num_steps + 1)  # at once

    def values(self) -> dict[str, torch.Tensor]:
        """What is kept, by variable: copies."""
        return {name: own.clone() for name, own in self._now.kept.items()}


def _drawn(variable: str, columns: int, rank: int, seed: int) -> torch.Tensor:
    """Random numbers that follow from these alone; uniform ones, which are the same on every processor."""
    number = int.from_bytes(hashlib.blake2b(f"{seed} {variable}".encode(), digest_size=7).digest())
    generator = torch.Generator().manual_seed(number)
    return torch.rand(rank, columns, dtype=torch.float64, generator=generator).sub_(0.5).T
