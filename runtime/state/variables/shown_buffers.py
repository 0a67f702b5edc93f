"""Per-replica buffers, such as BatchNorm's statistics: the model has their aggregate; the user's writes go to all replicas."""

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
    """A buffer's range in the aggregate (``now``) and its copy. ``is_counted``: its module counts forwards."""

    name: str
    place: slice
    now: torch.Tensor
    then: torch.Tensor
    is_counted: bool

    def is_written(self) -> bool:
        return not torch.equal(_bits(self.now), _bits(self.then))


class ShownBuffers:
    """Buffers of one dtype side by side, so that one addition aggregates them all.

    Batch normalization does not change the versions of its statistics, so the user's writes are detected by comparison
    with a copy of the last aggregate. On a GPU, this would synchronize. For modules that count forwards
    (``num_batches_tracked``), `VariableStore` compares the counter instead.

    Args:
        sizes: the number of elements of each buffer, by name, in order.
        shown: the user's aggregate, 1-D.
        flats: the values of each replica, 1-D.
        counted: names of buffers whose module counts its forwards.
    """

    def __init__(
        self, sizes: Mapping[str, int], shown: torch.Tensor, flats: Sequence[torch.Tensor], counted: Collection[str]
    ) -> None:
        self._shown = shown
        self._flats = flats
        self._reference = shown.clone()
        self._now, self._then = _bits(shown), _bits(self._reference)
        starts = [0, *accumulate(sizes.values())]
        self._members = [
            _Member(name, slice(start, end), shown[start:end], self._reference[start:end], name in counted)
            for name, (start, end) in zip(sizes, pairwise(starts), strict=True)
        ]
        self.names = frozenset(sizes)

    def renamed(self, names: Mapping[str, str]) -> ShownBuffers:
        other = shallow_copy(self)
        other._members = [replace(member, name=names[member.name]) for member in self._members]
        other.names = frozenset(member.name for member in other._members)
        return other

    def aggregate(self, written: Mapping[str, Aggregation], present: Sequence[int]) -> None:
        """Aggregates the present replicas' values. Unwritten buffers keep their bits, because a mean of equal numbers
        may be rounded.

        A value such as a counter, equal on all replicas before and on all present ones now, is copied to all.
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
                continue
            others = [flat[member.place] for flat in absent]
            if written[member.name] not in (Aggregation.SAME, Aggregation.COUNTER) and others:
                present_values = [flat[member.place] for flat in flats]
                are_same = _are_equal(present_values) and _are_equal([member.then, *others], is_rounded=True)
                others = others if are_same else []
            for other in others:
                other.copy_(flats[0][member.place])
        self._reference.copy_(shown)

    def note(self) -> None:
        self._reference.copy_(self._shown)

    def written_by_user(self) -> list[str]:
        members = self._members
        if self._shown.is_cuda:
            members = [member for member in members if not member.is_counted]
        elif torch.equal(self._now, self._then):
            return []
        return [member.name for member in members if member.is_written()]

    def is_written(self, name: str) -> bool:
        return any(member.is_written() for member in self._members if member.name == name)


class CopiesOfShown:
    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._pairs: dict[tuple[str, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, name: str, shown: torch.Tensor) -> list[torch.Tensor]:
        tensors = []
        for device in self._devices:
            place = device.torch_device
            if place != shown.device and (name, place) not in self._pairs:
                self._pairs[(name, place)] = shown, shown.to(place)
            tensors.append(shown if place == shown.device else self._pairs[(name, place)][1])
        return tensors

    def keep_only(self, names: Collection[str]) -> None:
        self._pairs = {key: pair for key, pair in self._pairs.items() if key[0] in names}

    def renew(self) -> None:
        for shown, copy in self._pairs.values():
            copy.copy_(shown)


def _are_equal(tensors: Sequence[torch.Tensor], *, is_rounded: bool = False) -> bool:
    """``is_rounded``: the first tensor is a mean of values that may be equal."""
    first, *others = tensors
    if is_rounded and first.is_floating_point():
        rtol = 4 * torch.finfo(first.dtype).eps
        return all(torch.allclose(first, t.to(first.device), rtol, 0.0, equal_nan=True) for t in others)
    return all(torch.equal(_bits(first), _bits(t.to(first.device))) for t in others)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """An integer view, in which NaN equals itself."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_INTEGERS[real.element_size()]) if real.is_floating_point() else real
