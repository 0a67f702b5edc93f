"""All-reduce by recursive halving and doubling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mirrorc.passes.all_reduce.algorithm import AllReduceAlgorithm
from mirrorc.passes.all_reduce.traffic import Held, Traffic


@dataclass(frozen=True)
class HalvingDoubling(AllReduceAlgorithm):
    """Devices at distance N/2, N/4, ..., 1 exchange and add halves of their sums; then devices at distance 1, 2, ...,
    N/2 exchange the sums.

    As in a ring, a device sends 2 (N - 1) / N of the bucket, but in only 2 log2(N) messages. If N is not a power of
    two, each surplus device first sends its bucket to another device, which returns the sum.

    Source: Thakur, Rabenseifner and Gropp (2005).
    """

    name: str = field(default="halving-doubling", init=False)

    def add_up(self, traffic: Traffic) -> Sequence[Held]:
        power = 1 << (traffic.num_replicas.bit_length() - 1)
        chunks = traffic.chunks(power)
        held = [traffic.own(replica) for replica in range(power)]
        if power < traffic.num_replicas:
            for replica in range(power, traffic.num_replicas):
                sent = traffic.send(traffic.own(replica), replica - power)
                held[replica - power] = traffic.add(held[replica - power], sent)
            traffic.next_round()
        distance = power // 2
        while distance:
            received = []
            for replica, value in enumerate(held):
                partner = replica ^ distance
                first = partner - partner % distance  # the chunks that the partner keeps
                half = traffic.cut(value, chunks[first][0], chunks[first + distance - 1][1])
                received.append(traffic.send(half, partner, chunk=first))
            for replica, value in enumerate(held):
                got = received[replica ^ distance]
                held[replica] = traffic.add(traffic.cut(value, got.start, got.stop), got)
            distance //= 2
            traffic.next_round()
        return held

    def spread(self, traffic: Traffic, sums: Sequence[Held]) -> Sequence[Held]:
        power, held, distance = len(sums), list(sums), 1
        while distance < power:
            received = [
                traffic.send(value, replica ^ distance, chunk=replica - replica % distance)
                for replica, value in enumerate(held)
            ]
            held = [traffic.joined([value, received[replica ^ distance]]) for replica, value in enumerate(held)]
            distance *= 2
            traffic.next_round()
        return [*held, *(traffic.send(held[extra], power + extra) for extra in range(traffic.num_replicas - power))]
