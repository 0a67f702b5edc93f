"""Buffers of which every replica has its own: how the model shows them, and what the user writes into what it shows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy as shallow_copy
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from mirrorc.ir.devices import Device
from mirrorc.ir.variables import Aggregation

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Member:
    """A buffer's part of what is shown, and of the copy of it; ``is_counted`` if a counter tells of forwards that write it."""

    name: str
    place: slice
    now: torch.Tensor
    then: torch.Tensor
    is_counted: bool

    def is_written(self) -> bool:
        """Whether it no longer has the bits that were shown last."""
        return not torch.equal(_bits(self.now), _bits(self.then))


class ShownBuffers:
    """Buffers of one dtype side by side, so that one addition aggregates them all.

    What was shown last is kept, because not every write counts a version: batch normalization writes its running statistics
    without. Comparing costs the host nothing but time; a GPU would have to be waited for, so there the buffers of modules that
    count their forwards (``num_batches_tracked``) are not compared, and `VariableStore` looks at the counter.

    Args:
        sizes: the number of elements of each buffer, by name, in order.
        shown: what the model shows, 1-D.
        flats: the memory of each replica, 1-D.
        counted: names of buffers whose module counts its forwards.

    Attributes:
        names: those of all buffers.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        shown: torch.Tensor,
        flats: Sequence[torch.Tensor],
        counted: Collection[str],
    ) -> None:
        self._shown = shown
        self._flats = flats
        self._kept = shown.clone()
        self._now, self._then = _bits(shown), _bits(self._kept)
        starts = [0, *accumulate(sizes.values())]
        self._members = [
            _Member(name, slice(start, end), shown[start:end], self._kept[start:end], name in counted)
            for name, (start, end) in zip(sizes, pairwise(starts), strict=True)
        ]
        self.names = frozenset(sizes)

    def renamed(self, names: Mapping[str, str]) -> ShownBuffers:
        """The same memory, in which the buffers have other names."""
        other = shallow_copy(self)
        other._members = [replace(member, name=names[member.name]) for member in self._members]
        other.names = frozenset(member.name for member in other._members)
        return other

    def aggregate(self, written: Mapping[str, Aggregation], present: Sequence[int]) -> None:
        """Shows the values of the replicas, aggregated.

        Args:
            written: the buffers that the step has written, and how each is shown as one. Others keep the very bits that are
                shown: a mean of equal numbers may be rounded.
            present: the replicas that have written them, because they had examples. The values of others count again when they
                write next; what all write alike, they take over.
        """
        kinds = {written[name] for name in self.names if name in written}
        if not kinds or not present:
            return
        shown, flats = self._shown, [self._flats[replica] for replica in present]
        shown.copy_(flats[0])
        if Aggregation.MEAN in kinds:
            for flat in flats[1:]:
                shown.add_(flat.to(shown.device))
            shown.div_(len(flats))
        absent = [flat for replica, flat in enumerate(self._flats) if replica not in present]
        for member in self._members:
            if member.name not in written:
                member.now.copy_(member.then)
            elif written[member.name] is Aggregation.SAME:
                for flat in absent:
                    flat[member.place].copy_(member.now)
        self._kept.copy_(shown)

    def note(self) -> None:
        """Keeps what is shown now, after it was mirrored."""
        self._kept.copy_(self._shown)

    def written_by_user(self) -> list[str]:
        """The names of the buffers that no longer have the bits that were shown last."""
        members = self._members
        if self._shown.is_cuda:
            members = [member for member in members if not member.is_counted]
        elif torch.equal(self._now, self._then):
            return []
        return [member.name for member in members if member.is_written()]

    def is_written(self, name: str) -> bool:
        """Whether one of the buffers no longer has the bits that were shown last."""
        return any(member.is_written() for member in self._members if member.name == name)


class CopiesOfShown:
    """What the model shows of per-replica buffers, on devices of other memory, for programs that read it and do not write it.

    Args:
        devices: the devices, in order of replicas.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._pairs: dict[tuple[str, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, name: str, shown: torch.Tensor) -> list[torch.Tensor]:
        """A buffer on every replica: the memory that the model shows, or a copy of it, which `renew` renews."""
        found = []
        for device in self._devices:
            place = device.torch_device
            if place != shown.device and (name, place) not in self._pairs:
                self._pairs[(name, place)] = shown, shown.to(place)
            found.append(shown if place == shown.device else self._pairs[(name, place)][1])
        return found

    def keep_only(self, names: Collection[str]) -> None:
        """Forgets other buffers."""
        self._pairs = {key: pair for key, pair in self._pairs.items() if key[0] in names}

    def renew(self) -> None:
        """Copies anew what the model shows now."""
        for shown, copy in self._pairs.values():
            copy.copy_(shown)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view as integers, so that not a number equals itself."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_INTEGERS[real.element_size()]) if real.is_floating_point() else real
