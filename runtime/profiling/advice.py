"""Estimates the gain of several changes, and recommends the best."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from mirrorc.analysis.cost.line import Line
from mirrorc.ir import ops
from mirrorc.ir.buckets import are_cut
from mirrorc.ir.links import link_named
from mirrorc.ir.nodes import bucket_of, calls_to, is_early, is_of
from mirrorc.ir.operation import Kind
from mirrorc.ir.program import Program
from mirrorc.printing.printed_values import size_text
from mirrorc.runtime.profiling.figures import BucketTimes, DeviceTimes, mean_over_devices
from mirrorc.runtime.profiling.recorder import Call, RecordedStep

_WORTHWHILE = 0.02  # the smallest gain that is advised, as a part of the step
_TELLING_BYTES = 2**16  # if the sizes of buckets differ by less, they do not show the cost of a byte;
_NOMINAL_SECONDS_PER_BYTE = 1e-9  # then a slow memory's cost is taken, but no more than the buckets cost
_MERGED_BYTES = 25 * 2**20
_REDUCTIONS = [reduction.__name__ for reduction in ops.REDUCTIONS]


def advise(
    program: Program,
    steps: Sequence[RecordedStep],
    step_ms: float,
    buckets: Sequence[BucketTimes],
    devices: Sequence[DeviceTimes],
) -> str:
    if program.workers.are_several:
        commits = calls_to(program.graphs()[0], ops.commit)
        when = (
            "its own sum is there, while others are in flight" if any(map(is_early, commits)) else "all sums are there"
        )
        return (
            "none is given for steps over several workers, as the time of other workers and of the network is not recorded. "
            f"Each bucket is updated when {when}."
        )
    if len(devices) == 1:
        return "nothing to do: one device has nobody to communicate with."
    skew_ms, transfer_ms = sum(bucket.skew_ms for bucket in buckets), sum(bucket.transfer_ms for bucket in buckets)
    skew_ms += statistics.fmean(device.parts_ms.get("commit", 0.0) for device in devices)
    exposed = f"{skew_ms + transfer_ms:.3f} ms in waits and the commit"
    meetings = _meetings(devices, sum(bucket.exposed_ms for bucket in buckets), step_ms)
    if skew_ms + transfer_ms < _WORTHWHILE * step_ms:
        return f"nothing worth doing: {exposed} are under {_WORTHWHILE:.0%} of the step{meetings}."
    candidates = [_evener_devices(program, steps, devices)]
    reduced = [bucket for bucket in buckets if bucket.kind in _REDUCTIONS]
    if reduced and not are_cut(program.buckets):
        costs = _costs(steps, reduced, len(devices))
        candidates += [_fewer_buckets(program, reduced, costs), _smaller_last_bucket(program, reduced, costs)]
    gain_ms, change = max(candidates)
    if gain_ms >= _WORTHWHILE * step_ms:
        return f"{change}. Estimated gain: {gain_ms:.3f} ms a step."
    first, last = (pick(devices, key=lambda device: device.started_ms) for pick in (min, max))
    why = f" ({last.device} starts {last.started_ms - first.started_ms:.3f} ms after {first.device})"
    return (
        f"nothing to change: of {exposed}, {skew_ms:.3f} ms are waiting for the last device"
        f"{why if last.started_ms - first.started_ms > skew_ms / 2 else ''}, {transfer_ms:.3f} ms moving and adding; no "
        f"other buckets or shards are estimated to save {_WORTHWHILE:.0%} of the step{meetings}."
    )


def _meetings(devices: Sequence[DeviceTimes], of_buckets_ms: float, step_ms: float) -> str:
    meetings_ms = statistics.fmean(device.exposed_ms for device in devices) - of_buckets_ms
    is_worth_a_word = meetings_ms >= _WORTHWHILE * step_ms
    return f"; the model's own collectives take another {meetings_ms:.3f} ms" if is_worth_a_word else ""


def _evener_devices(
    program: Program, steps: Sequence[RecordedStep], devices: Sequence[DeviceTimes]
) -> tuple[float, str]:
    """Estimates how much earlier the last device would reach the commit if all devices computed for the mean time."""
    mean_ms = statistics.fmean(device.compute_ms for device in devices)
    busy_ms = [_busy_ms(steps, replica) for replica in range(len(devices))]
    evened_ms = [busy - device.compute_ms + mean_ms for busy, device in zip(busy_ms, devices, strict=True)]
    replica = max(range(len(devices)), key=busy_ms.__getitem__)
    gain_ms = busy_ms[replica] - max(evened_ms)
    late, others = devices[replica], [device for r, device in enumerate(devices) if r != replica]
    usual_ms = statistics.fmean(device.compute_ms for device in others)
    rest = others[0].device if len(others) == 1 else "the others on average"
    change = f"even out the devices: {late.device} computes for {late.compute_ms:.3f} ms, {rest} for {usual_ms:.3f} ms"
    elsewhere = f"see what else runs on the cores of {late.device}"
    sizes = program.num_examples if len(program.num_examples) == len(devices) else (0,) * len(devices)
    if sizes[replica] < max(sizes):
        return gain_ms, f"{change}, though it has {sizes[replica]} examples and another {max(sizes)}: {elsewhere}"
    if any(device.region_ms.keys() != late.region_ms.keys() for device in others):
        return gain_ms, f"{change}, and shards differ in shape: {_even_shards(program)}"
    extra = {
        name: ms - statistics.fmean(device.region_ms.get(name, 0.0) for device in others)
        for name, ms in late.region_ms.items()
    }
    worst = max(extra, key=extra.__getitem__)
    return gain_ms, f"{change}, {extra[worst]:.3f} ms more in {worst}: {elsewhere}"


def _busy_ms(steps: Sequence[RecordedStep], replica: int) -> float:
    """Time until the commit, without waits, because a waiting device is not the last."""
    return statistics.fmean(
        (
            step.started_ns[replica]
            - step.begun_ns
            + sum(call.duration_ns for call in _before_commit(step.calls[replica]))
        )
        / 1e6
        for step in steps
    )


def _before_commit(calls: Sequence[Call]) -> Iterator[Call]:
    before = itertools.takewhile(lambda call: call.node.target is not ops.commit, calls)
    return (call for call in before if not is_of(call.node, Kind.WAIT))


def _even_shards(program: Program) -> str:
    sizes, num_replicas = program.num_examples, program.num_replicas
    if len(sizes) != num_replicas:
        return "give every device as many examples, of the same length"
    if len({*sizes}) == 1:
        return "give every device examples of the same length"
    below = sum(sizes) // num_replicas * num_replicas
    even = " or ".join(str(size) for size in (below, below + num_replicas) if size)
    return f"give every device as many examples, by a batch of {even} or another multiple of {num_replicas}"


def _fewer_buckets(program: Program, buckets: Sequence[BucketTimes], costs: _Costs) -> tuple[float, str]:
    """Estimates the gain of larger buckets: fewer fixed costs, but more bytes to transfer after backward."""
    totals: Counter[Any] = Counter()
    for times in buckets:
        bucket = program.buckets[times.index]
        totals[(bucket.dtype, bucket.rule)] += bucket.num_bytes
    num_left = sum(math.ceil(total / _MERGED_BYTES) for total in totals.values())
    last = program.buckets[buckets[-1].index]
    growth_bytes = max(0, min(_MERGED_BYTES, totals[(last.dtype, last.rule)]) - last.num_bytes)
    gain_ms = (len(buckets) - num_left) * costs.fixed_ms
    gain_ms -= growth_bytes * costs.moving_ms_per_byte if costs.moves_by_itself else 0.0
    cap_mb = _MERGED_BYTES / 2**20
    change = (
        f"fewer buckets, {num_left} instead of {len(buckets)}: each costs {costs.fixed_ms:.3f} ms whatever its size"
    )
    return gain_ms, f"{change} ({_in_options(f'mirrorc.packing.ByBytes({cap_mb:g}, {cap_mb:g})')})"


def _in_options(buckets: str) -> str:
    return f"communication=mirrorc.Communication(buckets={buckets})"


def _smaller_last_bucket(program: Program, buckets: Sequence[BucketTimes], costs: _Costs) -> tuple[float, str]:
    """A lower cap shrinks the last bucket, whose transfer no work hides."""
    last = buckets[-1]
    planned = [program.buckets[times.index] for times in buckets]
    least_bytes = max(slot.num_elements for slot in planned[-1].slots) * planned[-1].dtype.itemsize
    candidates = [(0.0, "")]
    for num_parts in (2, 4, 8) if costs.moves_by_itself else ():
        cap_bytes = last.num_bytes / num_parts
        left_bytes = max(least_bytes, int(cap_bytes))
        num_more = sum(min(len(bucket.slots), math.ceil(bucket.num_bytes / cap_bytes)) - 1 for bucket in planned)
        saved_ms = min(last.transfer_ms, (last.num_bytes - left_bytes) * costs.moving_ms_per_byte)
        sizes = f"{size_text(left_bytes)} instead of {size_text(last.num_bytes)}"
        change = f"a smaller last bucket, {sizes}: nothing is left to hide it"
        candidates.append(
            (saved_ms - num_more * costs.fixed_ms, f"{change} ({_in_options(f'{cap_bytes / 2**20:.2g}')})")
        )
    return max(candidates)


@dataclass(frozen=True)
class _Costs:
    fixed_ms: float
    moving_ms_per_byte: float
    moves_by_itself: bool


def _costs(steps: Sequence[RecordedStep], buckets: Sequence[BucketTimes], num_devices: int) -> _Costs:
    """A transfer lasts from its launch, or from the previous bucket's arrival, to its own arrival."""
    moves_by_itself = any(link_named(bucket.link).moves_by_itself for bucket in buckets)
    moving = [(bucket.num_bytes, bucket.transfer_ms) for bucket in buckets]
    if moves_by_itself:
        arrivals = sorted((bucket for bucket in buckets if bucket.transfer_ms > 0), key=lambda b: b.finished_ms)
        before_ms = [0.0, *(bucket.finished_ms for bucket in arrivals)][: len(arrivals)]
        times_ms = [b.finished_ms - max(b.launched_ms, ms) for b, ms in zip(arrivals, before_ms, strict=True)]
        moving = [(bucket.num_bytes, ms) for bucket, ms in zip(arrivals, times_ms, strict=True)]
    besides = [(bucket.num_bytes, _ms_besides_waits(steps, bucket.index, num_devices)) for bucket in buckets]
    line = _line(moving)
    return _Costs(1e3 * (line.seconds + _line(besides).seconds), 1e3 * line.seconds_per_byte, moves_by_itself)


def _ms_besides_waits(steps: Sequence[RecordedStep], bucket: int, num_devices: int) -> float:
    def is_of_bucket(node: fx.Node) -> bool:
        return node.target is not ops.wait and "bucket" in node.kwargs and bucket_of(node) == bucket

    return mean_over_devices(steps, num_devices, is_of_bucket)


def _line(costs: Sequence[tuple[int, float]]) -> Line:
    points = [(float(num_bytes), ms / 1e3) for num_bytes, ms in costs]
    return Line.through(points, nominal=_NOMINAL_SECONDS_PER_BYTE, telling_bytes=_TELLING_BYTES)
