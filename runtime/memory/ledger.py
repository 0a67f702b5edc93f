"""Live memory and its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from mirrorc.runtime.memory.dry_run import DryStep


@dataclass(eq=False)
class Block:
    """The memory of one value and of its views."""

    num_bytes: int
    name: str
    type: str


Where = tuple[fx.Node, DryStep | None]
"""A node of the device's graph and, within a region, a statement of its code; else None."""


@dataclass
class Ledger:
    holders: Counter[Block] = field(default_factory=Counter)
    total: int = 0
    peak: int = 0
    peak_at: Where | None = None
    most_during: dict[fx.Node, int] = field(default_factory=dict)
    history: list[tuple[Block, bool]] = field(default_factory=list)  # allocated (True) or released
    _peak_length: int = 0
    _left: set[Block] = field(default_factory=set)

    def hold(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.holders[block] += 1
            if self.holders[block] == 1 and block not in self._left:
                self._count(block, True)

    def drop(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0 and block not in self._left:
                self._count(block, False)

    def leave(self, blocks: Iterable[Block]) -> int:
        """Stops counting blocks that live until the next step replaces them; returns the removed bytes."""
        new = [block for block in dict.fromkeys(blocks) if block not in self._left]
        for block in new:
            self._count(block, False)
        self._left.update(new)
        return sum(block.num_bytes for block in new)

    def _count(self, block: Block, is_taken: bool) -> None:
        self.total += block.num_bytes if is_taken else -block.num_bytes
        self.history.append((block, is_taken))

    def note(self, where: Where) -> None:
        self.most_during[where[0]] = max(self.most_during.get(where[0], 0), self.total)
        if self.total > self.peak:
            self.peak, self.peak_at, self._peak_length = self.total, where, len(self.history)

    def at_peak(self) -> list[Block]:
        alive: dict[Block, None] = {}
        for block, is_taken in self.history[: self._peak_length]:
            if is_taken:
                alive[block] = None
            else:
                del alive[block]
        return sorted(alive, key=lambda block: -block.num_bytes)
