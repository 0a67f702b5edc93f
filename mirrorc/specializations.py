"""Keeps the compiled programs of a step by the kind of their calls: the most recently used ones."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from mirrorc.capture.arguments import Call
from mirrorc.capture.changing_arguments import CallKind, changing_arguments
from mirrorc.ir.source_lines import users_stack_level
from mirrorc.runtime.execution.executor import Executor

logger = logging.getLogger(__name__)

MOST_SPECIALIZATIONS = 64
"""How many compiled programs a step keeps. One that is needed again later is compiled again."""

_MANY_COMPILATIONS = 8  # when a step was compiled so many times, a warning says so, once

Key = tuple[Any, ...]
"""Everything that a graph depends on: structure of the call, types of the shards, then the parts named in `_OTHER_PARTS`."""

_OTHER_PARTS = ("the model's attributes", "the optimizer's groups", "torch's modes")


class Specializations:
    """A cache of executors. What is added when it is full takes the place of the executor that was not used for longest."""

    def __init__(self) -> None:
        self._executors: OrderedDict[Key, Executor] = OrderedDict()
        self._first: list[tuple[Key, CallKind]] | None = []  # the first compilations; None once they were warned of

    def get(self, key: Key) -> Executor | None:
        """The executor for calls of this kind, if there is one; it counts as used."""
        executor = self._executors.get(key)
        if executor is not None:
            self._executors.move_to_end(key)
        return executor

    def add(self, key: Key, call: Call, executor: Executor) -> list[Executor]:
        """Keeps an executor; returns those that it replaces, whose memory may be freed."""
        dropped = [replaced] if (replaced := self._executors.pop(key, None)) is not None else []
        self._executors[key] = executor
        while len(self._executors) > MOST_SPECIALIZATIONS:
            dropped.append(self._executors.popitem(last=False)[1])
            logger.info(
                "a step keeps %d compiled programs: the one that was not used for longest is dropped",
                MOST_SPECIALIZATIONS,
            )
        if self._first is not None:
            self._first.append((key, CallKind.of(call, key[1][0])))
            self._warn_of_many(self._first)
        return dropped

    def __len__(self) -> int:
        return len(self._executors)

    def __iter__(self) -> Iterator[Executor]:
        return iter(tuple(self._executors.values()))

    def _warn_of_many(self, first: list[tuple[Key, CallKind]]) -> None:
        """When a step has been compiled many times, warns once and says what keeps changing."""
        if len(first) < _MANY_COMPILATIONS:
            return
        self._first = None
        keys, kinds = [key for key, _ in first], [kind for _, kind in first]
        changing = changing_arguments(kinds)
        changing += [part for i, part in enumerate(_OTHER_PARTS, 2) if len({key[i] for key in keys}) > 1]
        what = " and ".join(changing) or "the optimizer's state"
        warnings.warn(
            f"the step was compiled {len(first)} times, because {what} keep changing; each new value is compiled anew: pass "
            "numbers that change as tensors (mirrorc.replicated), and pad batches to few shapes",
            stacklevel=users_stack_level(),
        )
