"""How gradients of a run are packed, summed up, placed and sent, by names, and a draw of what goes together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from mirrorc.packing import ByBytes, EqualPacks, EqualSplits, Gradient, may_cut
from mirrorc.passes import ALGORITHMS


def by_layers(gradients: Sequence[Gradient]) -> list[list[str]]:
    groups: dict[Any, list[str]] = {}
    for one in gradients:
        groups.setdefault((one.name.rpartition(".")[0], one.dtype), []).append(one.name)
    return list(groups.values())


def smallest_first(gradient: Gradient) -> int:
    return gradient.elements


PACKINGS: dict[str, Any] = {
    "by bytes": "auto",
    "one for each": EqualPacks(0),
    "2 packs": EqualPacks(2),
    "7 packs": EqualPacks(7),
    "small ones": ByBytes(0.0002, 0.0001),
    "one": math.inf,
    "1 split": EqualSplits(1),
    "2 splits": EqualSplits(2),
    "layers": by_layers,
}
ORDERS: dict[str, str | Callable[[Gradient], Any]] = {
    "ready": "ready",
    "reversed": "reversed",
    "smallest first": smallest_first,
}
OWNED = ("central", "least-loaded", "cached")
PLACEMENTS = ("auto", "mirrored", "shared", *OWNED)


@dataclass(frozen=True)
class Plans:
    """What is asked for of buckets, sums, placement and exchange; the texts are keys, or what `mirrorc.compile` takes."""

    buckets: str = "by bytes"
    order: str = "ready"
    algorithm: str = "native"
    placement: str = "auto"
    exchange: str = "auto"

    def of_pipeline(self, bucket_bytes: int) -> dict[str, Any]:
        """The arguments of `mirrorc.passes.default_pipeline`; the size of a bucket counts where no other plan is asked for."""
        buckets, cap = PACKINGS[self.buckets], bucket_bytes / 2**20
        if buckets == "auto":
            buckets = ByBytes(cap, cap)
        algorithm = None if self.algorithm == "native" else ALGORITHMS[self.algorithm]()
        order = ORDERS[self.order]
        return {"buckets": buckets, "order": order, "algorithm": algorithm, "placement": self.placement}

    def simpler(self) -> Iterator[Plans]:
        for one in fields(self):
            if getattr(self, one.name) != one.default:
                yield replace(self, **{one.name: one.default})


AS_THEY_ARE = Plans()
"""What there is without any option."""


def draw_plans(draw: Random, *, has_factors: bool) -> Plans:
    """Plans that `mirrorc.compile` would take together; in one of two runs those that are there without any option."""
    if draw.random() < 0.5:
        return AS_THEY_ARE
    placement = draw.choice(PLACEMENTS)
    packings, algorithms = list(PACKINGS), list(ALGORITHMS)
    if placement in OWNED:
        packings = [name for name, packing in PACKINGS.items() if packing == "auto" or not may_cut(packing)]
        algorithms = [name for name, algorithm in ALGORITHMS.items() if not algorithm().sends]
    return Plans(
        buckets=draw.choice(packings),
        order=draw.choice(tuple(ORDERS)),
        algorithm=draw.choice(algorithms),
        placement=placement,
        exchange=draw.choice(("auto", "dense", "factors") if has_factors else ("auto", "dense")),
    )
