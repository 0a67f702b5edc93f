"""Rounds printed milliseconds so that they add up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mirrorc.runtime.profiling.accounting import apportioned


@dataclass(frozen=True)
class Rounding:
    """Milliseconds as whole units of the last printed digit."""

    digits: int

    @classmethod
    def for_step(cls, step_ms: float) -> Rounding:
        return cls(3 if step_ms < 10 else 2 if step_ms < 1000 else 1)

    def text(self, ms: float) -> str:
        return f"{ms:.{self.digits}f}"

    def units(self, ms: float) -> int:
        """Derived from the text, because ``round(ms * scale)`` may round a tie differently."""
        return round(float(self.text(ms)) * 10**self.digits)

    def text_of(self, units: int) -> str:
        return self.text(units / 10**self.digits)

    def adding_up(self, values: Iterable[float], total: float) -> list[str]:
        """Texts whose sum is the text of the total."""
        return [self.text_of(units) for units in apportioned([*values], self.units(total))]
