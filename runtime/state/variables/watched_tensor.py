"""A tensor of the user's, and how it was when mirrorc last saw it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch


@dataclass
class Watched:
    """A tensor, as mirrorc last saw it. ``home`` is mirrorc's memory, of which the tensor should be a view; None for its own."""

    tensor: torch.Tensor
    version: int
    address: int
    home: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor, home: torch.Tensor | None) -> Watched:
        """A tensor as it is now."""
        return cls(tensor, tensor._version, tensor.data_ptr(), home)

    def has_changed(self) -> bool:
        """Whether it was written in place, as far as torch counts that, or has other memory."""
        return self.tensor._version != self.version or self.has_moved()

    def has_moved(self) -> bool:
        """Whether it has other memory."""
        return self.tensor.data_ptr() != self.address

    def note(self) -> None:
        """Takes the present tensor for unchanged."""
        self.version, self.address = self.tensor._version, self.tensor.data_ptr()


def count_write(written: Collection[Watched]) -> None:
    """Counts a version of tensors whose memory mirrorc has written, and takes them for unchanged."""
    torch.autograd.graph.increment_version([one.tensor for one in written])
    for one in written:
        one.version = one.tensor._version


def memory_of(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor is in."""
    return tensor.untyped_storage().data_ptr()


def leave_homes_of_others(changed: Collection[Watched], watched: Collection[Watched]) -> None:
    """Gives memory of its own to each tensor that the user has put where another variable belongs, as by an exchange.

    Args:
        changed: the tensors that have changed.
        watched: all that there are.
    """
    homes = {memory_of(one.home) for one in watched if one.home is not None}
    for one in changed:
        is_home = one.home is not None and one.tensor.data_ptr() == one.home.data_ptr()
        if not is_home and memory_of(one.tensor) in homes:
            one.tensor.data = one.tensor.detach().clone()
