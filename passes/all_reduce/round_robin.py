"""All-reduce on devices in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mirrorc.passes.all_reduce.algorithm import AllReduceAlgorithm
from mirrorc.passes.all_reduce.reduce_to_one import reduced_on
from mirrorc.passes.all_reduce.traffic import Held, Traffic


@dataclass(frozen=True)
class RoundRobin(AllReduceAlgorithm):
    """Adds up bucket i on device i mod k, which sends the sum to all others. It is `ReduceToOne` with balanced load.

    Attributes:
        num_devices: k; None for all devices.

    Source: the naive mode of tensorpack's parameter placement.
    """

    num_devices: int | None = None
    name: str = field(default="round-robin", init=False)

    @property
    def changes_bits(self) -> str:
        return ""

    def objection(self, num_replicas: int) -> str:
        number = self.num_devices
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        if number is not None and not (is_whole and 0 < number <= num_replicas):
            return f"num_devices is {number!r}: give a number from 1 to {num_replicas}, or None for all"
        return ""

    def add_up(self, traffic: Traffic) -> Sequence[Held]:
        return [reduced_on(traffic, traffic.number % (self.num_devices or traffic.num_replicas))]
