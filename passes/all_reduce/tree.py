"""All-reduce in a binomial tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mirrorc.passes.all_reduce.algorithm import AllReduceAlgorithm
from mirrorc.passes.all_reduce.traffic import Held, Traffic


@dataclass(frozen=True)
class Tree(AllReduceAlgorithm):
    """Devices at distance 1, 2, 4, ... are added up in pairs, on the lower device. The root's sum then returns the same
    way.

    It suits small buckets: each message is a whole bucket, but the critical path has only 2 ceil(log2(N)) messages.

    Attributes:
        device: the root.
    """

    device: int = 0
    name: str = field(default="tree", init=False)

    def objection(self, num_replicas: int) -> str:
        if isinstance(self.device, bool) or not isinstance(self.device, int) or not 0 <= self.device < num_replicas:
            return f"device is {self.device!r}: give a number from 0 to {num_replicas - 1}"
        return ""

    def add_up(self, traffic: Traffic) -> Sequence[Held]:
        held = [traffic.own(self._replica(place, traffic)) for place in range(traffic.num_replicas)]
        for distance in self._distances(traffic):
            for place in range(0, traffic.num_replicas - distance, 2 * distance):
                sent = traffic.send(held[place + distance], held[place].replica)
                held[place] = traffic.add(held[place], sent)
            traffic.next_round()
        return [held[0]]

    def spread(self, traffic: Traffic, sums: Sequence[Held]) -> Sequence[Held]:
        held = {0: sums[0]}  # by the distance from the root, counted round
        for distance in reversed(self._distances(traffic)):
            for place in range(0, traffic.num_replicas - distance, 2 * distance):
                held[place + distance] = traffic.send(held[place], self._replica(place + distance, traffic))
            traffic.next_round()
        return sorted(held.values(), key=lambda value: value.replica)

    def _replica(self, place: int, traffic: Traffic) -> int:
        return (self.device + place) % traffic.num_replicas

    def _distances(self, traffic: Traffic) -> list[int]:
        return [1 << i for i in range((traffic.num_replicas - 1).bit_length())]
