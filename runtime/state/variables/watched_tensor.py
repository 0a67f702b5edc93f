"""A user's tensor, with the version and address of mirrorc's last visit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch


@dataclass
class Watched:
    """A tensor as last seen. ``home`` is its memory in mirrorc's buffers; None for the tensor's own memory."""

    tensor: torch.Tensor
    version: int
    address: int
    home: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor, home: torch.Tensor | None) -> Watched:
        return cls(tensor, tensor._version, tensor.data_ptr(), home)

    def has_changed(self) -> bool:
        """Test for a write with a version count, or for new memory."""
        return self.tensor._version != self.version or self.has_moved()

    def has_moved(self) -> bool:
        return self.tensor.data_ptr() != self.address

    def note(self) -> None:
        self.version, self.address = self.tensor._version, self.tensor.data_ptr()


def count_write(written: Collection[Watched]) -> None:
    """Counts a version of tensors written by mirrorc, and marks them as unchanged."""
    torch.autograd.graph.increment_version([one.tensor for one in written])
    for one in written:
        one.version = one.tensor._version


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def leave_homes_of_others(changed: Collection[Watched], watched: Collection[Watched]) -> None:
    """Gives separate memory to each tensor that the user put into another variable's home, as in a swap."""
    homes = {memory_of(one.home) for one in watched if one.home is not None}
    for one in changed:
        is_home = one.home is not None and one.tensor.data_ptr() == one.home.data_ptr()
        if not is_home and memory_of(one.tensor) in homes:
            one.tensor.data = one.tensor.detach().clone()
