"""All-reduce in a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mirrorc.passes.all_reduce.algorithm import AllReduceAlgorithm
from mirrorc.passes.all_reduce.traffic import Held, Traffic


@dataclass(frozen=True)
class Ring(AllReduceAlgorithm):
    """Cuts the bucket into N chunks; in each of 2 (N - 1) rounds, each device sends one chunk to the next device.

    The first N - 1 rounds are a reduce-scatter, the others an all-gather. A device sends 2 (N - 1) / N of the bucket,
    the least possible.

    Source: the bandwidth-optimal ring of Patarasuk and Yuan (2009).
    """

    name: str = field(default="ring", init=False)

    def add_up(self, traffic: Traffic) -> Sequence[Held]:
        count = traffic.num_replicas
        chunks = traffic.chunks(count)
        passed = [traffic.own(replica, *chunks[replica - 1]) for replica in range(count)]
        for number in range(count - 1):
            if number:
                traffic.next_round()
            passed = _passed_on(traffic, passed, [(replica - 1 - number) % count for replica in range(count)])
            for replica in range(count):
                gradient = traffic.own(replica, *chunks[(replica - 2 - number) % count])
                passed[replica] = traffic.add(gradient, passed[replica])
        return passed

    def spread(self, traffic: Traffic, sums: Sequence[Held]) -> Sequence[Held]:
        count, passed = traffic.num_replicas, list(sums)
        chunks_of = [[held] for held in sums]
        for number in range(count - 1):
            if number:
                traffic.next_round()
            passed = _passed_on(traffic, passed, [(replica - number) % count for replica in range(count)])
            for replica in range(count):
                chunks_of[replica].append(passed[replica])
        return [traffic.joined(held) for held in chunks_of]


def _passed_on(traffic: Traffic, held: Sequence[Held], chunks: Sequence[int]) -> list[Held]:
    count = traffic.num_replicas
    received = [traffic.send(held[replica], (replica + 1) % count, chunks[replica]) for replica in range(count)]
    return [received[replica - 1] for replica in range(count)]
