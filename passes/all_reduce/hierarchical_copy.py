"""All-reduce within groups of devices, then between groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mirrorc.passes.all_reduce.algorithm import AllReduceAlgorithm
from mirrorc.passes.all_reduce.traffic import Held, Traffic


@dataclass(frozen=True)
class HierarchicalCopy(AllReduceAlgorithm):
    """Sums each group of neighbouring devices on its main device. Main devices exchange these sums, add them, and send
    the total to their groups.

    Only main devices send between groups, where connections are often slower. The main device rotates: for bucket i it
    is device i mod group size.

    Attributes:
        groups: at least 2; their sizes differ by at most 1.

    Source: the hierarchical copies of TensorFlow and tensorpack, with two groups of four GPUs.
    """

    groups: int = 2
    name: str = field(default="hierarchical-copy", init=False)

    def objection(self, num_replicas: int) -> str:
        number = self.groups
        if isinstance(number, bool) or not isinstance(number, int) or number < 2:
            return f"groups is {number!r}: give a number of groups, 2 at least"
        return f"groups is {number}, more than there are devices" if number > num_replicas > 1 else ""

    def add_up(self, traffic: Traffic) -> Sequence[Held]:
        sums = []
        for group in self._groups(traffic):
            main = group[traffic.number % len(group)]
            gradients = [traffic.own(replica) for replica in group]
            sums.append(
                traffic.add_all(
                    [gradient if gradient.replica == main else traffic.send(gradient, main) for gradient in gradients]
                )
            )
        traffic.next_round()
        mains = [held.replica for held in sums]
        received = {main: [h if h.replica == main else traffic.send(h, main) for h in sums] for main in mains}
        return [traffic.add_all(received[main]) for main in mains]

    def seen_by(self, replica: int, traffic: Traffic, sums: Sequence[Held]) -> Sequence[Held]:
        (group,) = (group for group in self._groups(traffic) if replica in group)
        return [held for held in sums if held.replica in group]

    def _groups(self, traffic: Traffic) -> list[range]:
        cuts = [traffic.num_replicas * i // self.groups for i in range(self.groups + 1)]
        return [range(*bounds) for bounds in pairwise(cuts)]
