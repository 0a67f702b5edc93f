"""State in the user's optimizers, and detection of writes to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from mirrorc.torch_internals import copy_each


class ShownNumbers:
    """Scalars of buckets, repeated for every parameter of a bucket.

    A write to a scalar may leave its version unchanged, so the values are compared before every step.
    """

    def __init__(self, scalars: Sequence[tuple[torch.Tensor, int]]) -> None:
        self._scalars = [number.detach() for number, _ in scalars]
        self.shown: list[torch.Tensor] = list(self._scalars)
        self.flats: list[torch.Tensor] = []
        by_kind: dict[Any, list[int]] = defaultdict(list)
        for i, number in enumerate(self._scalars):
            by_kind[number.dtype, number.device].append(i)
        for places in by_kind.values():
            flat = torch.cat([self._scalars[i].expand(scalars[i][1]) for i in places])
            self.flats.append(flat)
            for i, part in zip(places, flat.split([scalars[i][1] for i in places]), strict=True):
                self.shown[i] = part
        self._compared = [flat for flat in self.flats if flat.device.type == "cpu"]  # a GPU would be waited for
        self._written = [flat.clone() for flat in self._compared]

    def write(self) -> None:
        copy_each(self.shown, self._scalars)
        copy_each(self._written, self._compared)

    def are_as_written(self) -> bool:
        """True if the values on the CPU are unchanged. Values on GPUs are not compared, because this would synchronize."""
        return all(map(torch.equal, self._compared, self._written))


class ShownState:
    """A snapshot of the state in the user's optimizers after mirrorc's last write.

    Each step compares identities, names and version counters with the snapshot, by loops in C.
    """

    def __init__(self) -> None:
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._is_empty = True
        self._states: list[Any] = []  # what each parameter has
        self._dicts: list[dict[str, Any]] = []  # the dicts among these
        self._names: list[str] = []
        self._values: list[Any] = []
        self._counted: list[torch.Tensor] = []
        self._versions: list[int] = []

    def put(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        states: Iterable[tuple[torch.optim.Optimizer, torch.Tensor, Mapping[str, Any]]],
        counted: Iterable[torch.Tensor],
    ) -> None:
        """Adds entries to the state of parameters, in the same dicts. Idempotent.

        Args:
            counted: tensors whose versions show writes to these entries.
        """
        for optimizer, parameter, entries in states:
            optimizer.state.setdefault(parameter, {}).update(entries)
        self._is_empty, self._optimizers = False, optimizers
        self._counted = list(counted)
        self.look_again()
        self.count_versions()

    def look_again(self) -> None:
        if self._is_empty:
            return
        self._states = self._states_now()
        self._dicts = [entries for entries in self._states if isinstance(entries, dict)]
        self._names = list(chain.from_iterable(self._dicts))
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))

    def _states_now(self) -> list[Any]:
        return list(chain.from_iterable(optimizer.state.values() for optimizer in self._optimizers))

    def forget(self) -> None:
        self._is_empty = True

    def count_versions(self) -> None:
        self._versions = [tensor._version for tensor in self._counted]

    def has_changed(self) -> bool:
        if self._is_empty:
            return False
        return not (
            are_the_same(self._states_now(), self._states)
            and are_the_same(list(chain.from_iterable(map(dict.values, self._dicts))), self._values)
            and list(chain.from_iterable(self._dicts)) == self._names
            and [tensor._version for tensor in self._counted] == self._versions
        )


def are_the_same(now: list[Any], then: list[Any]) -> bool:
    """Compares identities, because a comparison of tensors is element-wise."""
    return len(now) == len(then) and all(map(is_, now, then))
