"""Versions and addresses of the user's tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch


@dataclass
class Watched:
    """A tensor as mirrorc last used it. ``home`` is its memory in mirrorc's buffers, or None."""

    tensor: torch.Tensor
    version: int
    address: int
    home: torch.Tensor | None

    @classmethod
    def of(cls, tensor: torch.Tensor, home: torch.Tensor | None) -> Watched:
        return cls(tensor, tensor._version, tensor.data_ptr(), home)

    def has_changed(self) -> bool:
        return self.tensor._version != self.version or self.has_moved()

    def has_moved(self) -> bool:
        return self.tensor.data_ptr() != self.address

    def note(self) -> None:
        self.version, self.address = self.tensor._version, self.tensor.data_ptr()


def count_write(written: Collection[Watched]) -> None:
    """Increments versions of tensors that mirrorc has written, and marks the tensors as unchanged."""
    torch.autograd.graph.increment_version([watched.tensor for watched in written])
    for watched in written:
        watched.version = watched.tensor._version


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def leave_homes_of_others(changed: Collection[Watched], watched: Collection[Watched]) -> None:
    """Allocates memory for tensors that the user put into other variables' homes, as in a swap."""
    homes = {memory_of(entry.home) for entry in watched if entry.home is not None}
    for entry in changed:
        is_home = entry.home is not None and entry.tensor.data_ptr() == entry.home.data_ptr()
        if not is_home and memory_of(entry.tensor) in homes:
            entry.tensor.data = entry.tensor.detach().clone()
