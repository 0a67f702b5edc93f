"""Live memory and its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from mirrorc.runtime.memory.dry_run import Block, DryStep

Where = tuple[fx.Node, DryStep | None]
"""A node of the device's graph and, within a region, a statement of its code."""


@dataclass
class Peak:
    """A peak of live memory, at ``length`` of the history; ``at``: None if no value is ever live."""

    num_bytes: int = 0
    at: Where | None = None
    length: int = 0
    blocks: Sequence[Block] = ()  # the live values, the largest first, once the walk has ended


@dataclass
class Ledger:
    """Live memory of a device's step.

    Attributes:
        gradients: blocks other than activations: sums, messages, and operands of updates.
        holds_gradients: new blocks are gradients.
        total: live bytes; ``activations``: without ``gradients``.
        kept: bytes of gradients outside of buckets that live until the next step.
        most_during: the peak bytes during each call.
    """

    holders: Counter[Block] = field(default_factory=Counter)
    gradients: set[Block] = field(default_factory=set)
    holds_gradients: bool = False
    total: int = 0
    activations: int = 0
    peak: Peak = field(default_factory=Peak)
    activation_peak: Peak = field(default_factory=Peak)
    kept: int = 0
    most_during: dict[fx.Node, int] = field(default_factory=dict)
    history: list[tuple[Block, bool]] = field(default_factory=list)  # allocated (True) or released
    _left: set[Block] = field(default_factory=set)

    def hold(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if self.holds_gradients and block not in self.holders:
                self.gradients.add(block)
            self.holders[block] += 1
            if self.holders[block] == 1 and block not in self._left:
                self._count(block, True)

    def drop(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.holders[block] -= 1
            if self.holders[block] == 0 and block not in self._left:
                self._count(block, False)

    def leave(self, blocks: Iterable[Block]) -> None:
        """Stops counting blocks that live until the next step replaces them."""
        new = [block for block in dict.fromkeys(blocks) if block not in self._left]
        for block in new:
            self._count(block, False)
        self._left.update(new)
        self.kept += sum(block.num_bytes for block in new)

    def _count(self, block: Block, is_taken: bool) -> None:
        num_bytes = block.num_bytes if is_taken else -block.num_bytes
        self.total += num_bytes
        if block not in self.gradients:
            self.activations += num_bytes
        self.history.append((block, is_taken))

    def note(self, where: Where) -> None:
        self.most_during[where[0]] = max(self.most_during.get(where[0], 0), self.total)
        for peak, num_bytes in ((self.peak, self.total), (self.activation_peak, self.activations)):
            if num_bytes > peak.num_bytes:
                peak.num_bytes, peak.at, peak.length = num_bytes, where, len(self.history)

    def end(self) -> None:
        for peak in (self.peak, self.activation_peak):
            alive: dict[Block, None] = {}
            for block, is_taken in self.history[: peak.length]:
                if is_taken:
                    alive[block] = None
                else:
                    del alive[block]
            counted = [block for block in alive if peak is self.peak or block not in self.gradients]
            peak.blocks = sorted(counted, key=lambda block: -block.num_bytes)
