"""Puts state into the user's optimizer, and tells whether it is still there, untouched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch


class ShownState:
    """What the user's optimizer shows, as it was when mirrorc last put something there.

    The comparison is made before every step, so it loops in C over identities: of the parameters that have state, of the dicts
    of their entries, and of the entries' names and values. Writes in place are told by the
    version counters of tensors.

    Args:
        optimizer: the user's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_empty = True
        self._states: list[Any] = []  # what each parameter has
        self._dicts: list[dict[str, Any]] = []  # the dicts among these
        self._names: list[str] = []
        self._values: list[Any] = []
        self._counted: list[torch.Tensor] = []
        self._versions: list[int] = []

    def put(self, states: Iterable[tuple[torch.Tensor, Mapping[str, Any]]], counted: Iterable[torch.Tensor]) -> None:
        """Puts entries beside what a parameter has; the dict that the user may hold stays the same. May be repeated.

        Args:
            states: entries for each parameter.
            counted: the tensors whose version counters tell of writes into these entries.
        """
        state = self._optimizer.state
        for parameter, entries in states:
            state.setdefault(parameter, {}).update(entries)
        self._is_empty = False
        self._states = list(state.values())
        self._dicts = [entries for entries in self._states if isinstance(entries, dict)]
        self._names = list(chain.from_iterable(self._dicts))
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._counted = list(counted)
        self.count_versions()

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
            are_the_same(list(self._optimizer.state.values()), self._states)
            and are_the_same(list(chain.from_iterable(map(dict.values, self._dicts))), self._values)
            and list(chain.from_iterable(self._dicts)) == self._names
            and [tensor._version for tensor in self._counted] == self._versions
        )


def are_the_same(now: list[Any], then: list[Any]) -> bool:
    """Whether two lists have the very same objects; comparing tensors by value would compare their elements."""
    return len(now) == len(then) and all(map(is_, now, then))
