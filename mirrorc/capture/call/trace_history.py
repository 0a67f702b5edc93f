"""What became of the traces of a step: whether they came out alike, and whether what they read keeps changing."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from typing import Any

_MOST_STATES = 4  # of what Python reads for which a call is traced, where another front end could run it


class TraceHistory:
    """The traces of a step in Python.

    Attributes:
        differences: how later traces of a call have differed from the first, each in words that follow "to".
        has_other: whether another front end is tried if this step is traced no more.
    """

    def __init__(self, *, has_other: bool = False) -> None:
        self.differences: list[str] = []
        self.has_other = has_other
        self._guards: defaultdict[Hashable, deque[Any]] = defaultdict(lambda: deque(maxlen=_MOST_STATES))

    def note(self, kind: Hashable, guards: Any) -> None:
        """Notes the guards of a new trace, on a call with tensors of some kind."""
        self._guards[kind].append(guards)

    def why_not(self, kind: Hashable) -> str:
        """Why a call of this kind is not to be traced any more, as what follows a colon; empty if it may be."""
        if self.differences:
            return f"another call is traced to {self.differences[0]}"
        last = self._guards[kind]
        changed = [guards.broken() for guards in last] if self.has_other and len(last) == _MOST_STATES else []
        if changed and all(changed):
            return f"what it reads keeps changing ({changed[-1]!r}), and each value would be a program of its own"
        return ""
