"""Puts state into the user's optimizers, and tells whether it is still there, untouched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from mirrorc.torch_internals import copy_each


class ShownNumbers:
    """Numbers of buckets, each shown once for every parameter of its bucket.

    They are copies, and a write may count no version, so they are compared by value before every step: those of one dtype and
    device lie side by side, beside a second copy.

    Args:
        own: each number, a scalar, and how often it is shown; or a row of as many numbers, each of which is shown once.

    Attributes:
        shown: the copies of each, 1-D.
        flats: the memory in which they lie.
    """

    def __init__(self, own: Sequence[tuple[torch.Tensor, int]]) -> None:
        self._own = [number.detach() for number, _ in own]
        self.shown: list[torch.Tensor] = list(self._own)
        self.flats: list[torch.Tensor] = []
        by_kind: dict[Any, list[int]] = defaultdict(list)
        for i, number in enumerate(self._own):
            by_kind[number.dtype, number.device].append(i)
        for places in by_kind.values():
            flat = torch.cat([self._own[i].expand(own[i][1]) for i in places])
            self.flats.append(flat)
            for i, part in zip(places, flat.split([own[i][1] for i in places]), strict=True):
                self.shown[i] = part
        self._compared = [flat for flat in self.flats if flat.device.type == "cpu"]  # a GPU would be waited for
        self._written = [flat.clone() for flat in self._compared]

    def write(self) -> None:
        """Shows what the buckets' numbers are now; may be repeated."""
        copy_each(self.shown, self._own)
        copy_each(self._written, self._compared)

    def are_as_written(self) -> bool:
        """Whether nobody else has written them; not known of those on GPUs."""
        return all(map(torch.equal, self._compared, self._written))


class ShownState:
    """What the user's optimizers show, as it was when mirrorc last put something there.

    The comparison is made before every step, so it loops in C over identities: of the parameters that have state, of the dicts
    of their entries, and of the entries' names and values. Writes in place are told by the
    version counters of tensors.
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
        """Puts entries beside what a parameter has; the dict that the user may hold stays the same. May be repeated.

        Args:
            optimizers: the user's that show something.
            states: which of them gets which entries for which parameter.
            counted: the tensors whose version counters tell of writes into these entries.
        """
        for optimizer, parameter, entries in states:
            optimizer.state.setdefault(parameter, {}).update(entries)
        self._is_empty, self._optimizers = False, optimizers
        self._counted = list(counted)
        self.look_again()
        self.count_versions()

    def look_again(self) -> None:
        """Takes note of the entries that are there, after an optimizer has made some by itself."""
        if self._is_empty:
            return
        self._states = self._states_now()
        self._dicts = [entries for entries in self._states if isinstance(entries, dict)]
        self._names = list(chain.from_iterable(self._dicts))
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))

    def _states_now(self) -> list[Any]:
        return list(chain.from_iterable(optimizer.state.values() for optimizer in self._optimizers))

    def forget(self) -> None:
        """Shows nothing: what the user does to the state is the user's own matter."""
        self._is_empty = True

    def count_versions(self) -> None:
        """Takes note of what mirrorc itself has just written."""
        self._versions = [tensor._version for tensor in self._counted]

    def has_changed(self) -> bool:
        """Whether the user has replaced, added, removed or written state since."""
        if self._is_empty:
            return False
        return not (
            are_the_same(self._states_now(), self._states)
            and are_the_same(list(chain.from_iterable(map(dict.values, self._dicts))), self._values)
            and list(chain.from_iterable(self._dicts)) == self._names
            and [tensor._version for tensor in self._counted] == self._versions
        )


def are_the_same(now: list[Any], then: list[Any]) -> bool:
    """Whether two lists have the very same objects; comparing tensors by value would compare their elements."""
    return len(now) == len(then) and all(map(is_, now, then))
