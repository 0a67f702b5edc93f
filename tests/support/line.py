"""An algorithm of all-reduce from outside of the package: what one more of them takes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mirrorc.all_reduce_algorithms import AllReduceAlgorithm, Held, Traffic


@dataclass(frozen=True)
class Line(AllReduceAlgorithm):
    """The sum goes along the line of devices, each of which adds its own; the whole sum comes back the same way."""

    name: str = field(default="line", init=False)

    def add_up(self, traffic: Traffic) -> Sequence[Held]:
        total = traffic.own(0)
        for replica in range(1, traffic.num_replicas):
            total = traffic.add(traffic.send(total, replica), traffic.own(replica))
        return [total]

    def spread(self, traffic: Traffic, sums: Sequence[Held]) -> Sequence[Held]:
        found = list(sums)
        for replica in reversed(range(traffic.num_replicas - 1)):
            found.append(traffic.send(found[-1], replica))
        return found[::-1]
