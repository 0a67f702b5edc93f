"""What the figures of all probes together should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Tables = Mapping[str, Mapping[str, Any]]
"""The figures of each probe, by its name."""


@dataclass(frozen=True)
class Goal:
    """A ratio, and the most that it should be; None if it is only of interest."""

    what: str
    found: float
    most: float | None

    @property
    def verdict(self) -> str:
        """Whether the goal is met."""
        if self.most is None:
            return ""
        return "met" if self.found <= self.most else "missed"


def _ratio(tables: Tables, one: str, other: str, figure: str) -> float | None:
    above, below = tables.get(one, {}).get(figure), tables.get(other, {}).get(figure)
    return above / below if above and below else None


def _memory(tables: Tables, name: str) -> float | None:
    told, peak = tables.get(name, {}).get("told MiB"), tables.get(name, {}).get("peak MiB")
    return max(told / peak, peak / told) if told and peak else None


_GOALS: tuple[tuple[str, float | None, Callable[[Tables], float | None]], ...] = (
    (
        "gpt2-8: GPU ms of mirrorc / torch.compile",
        1.05,
        lambda tables: _ratio(tables, "gpt2-8 mirrorc", "gpt2-8 torch.compile", "GPU ms"),
    ),
    (
        "mlp-8: GPU ms of mirrorc with graphs / reduce-overhead",
        1.05,
        lambda tables: _ratio(tables, "mlp-8 mirrorc-graphs", "mlp-8 reduce-overhead", "GPU ms"),
    ),
    ("gpt2-8: memory() / peak, or the inverse", 1.15, lambda tables: _memory(tables, "gpt2-8 mirrorc")),
    ("mlp-8: memory() / peak, or the inverse", 1.15, lambda tables: _memory(tables, "mlp-8 mirrorc")),
    ("gpt-8: memory() / peak, or the inverse", 1.15, lambda tables: _memory(tables, "gpt-8 mirrorc")),
    ("resnet-16: memory() / peak, or the inverse", 1.15, lambda tables: _memory(tables, "resnet-16 mirrorc")),
    *(
        (
            f"host ms of 8 devices / 1, {where} (8 means that launches are serial)",
            None,
            lambda tables, one=f"8 in {where}", other=f"1 in {base}": _ratio(tables, one, other, "host ms"),
        )
        for where, base in (("threads", "threads"), ("processes", "threads"), ("threads, C++", "threads, C++"))
    ),
)


def goals_of(tables: Tables) -> list[Goal]:
    """The goals about which the figures say something."""
    found = [(what, most, ratio(tables)) for what, most, ratio in _GOALS]
    return [Goal(what, ratio, most) for what, most, ratio in found if ratio is not None]
