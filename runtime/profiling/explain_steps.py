"""Explains the time of recorded steps, and advises the change with the largest estimated gain."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from mirrorc.analysis.communication.compressed_sums import num_bytes_sent
from mirrorc.analysis.cost.line import Line
from mirrorc.analysis.gradients.sent_factors import factor_bytes, packs_of
from mirrorc.analysis.gradients.sparse_update_rows import bytes_of_sent
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, are_cut
from mirrorc.ir.links import link_named
from mirrorc.ir.nodes import bucket_of, call_name, calls_to, is_early, is_of, is_region_call, pack_of
from mirrorc.ir.operation import Kind, Selection
from mirrorc.ir.program import CAPTURE, Program
from mirrorc.messages.wording import counted
from mirrorc.printing.printed_values import size_text
from mirrorc.runtime.profiling.accounting import PARTS, mean_parts_ms, typical
from mirrorc.runtime.profiling.collectives import Collective, Launch, collectives_of, skew_ns, sources_of
from mirrorc.runtime.profiling.explanation import Explanation
from mirrorc.runtime.profiling.figures import BucketTimes, DeviceFlight, DeviceTimes
from mirrorc.runtime.profiling.prediction import Foundations, predicted_of_steps
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
        are_early = any(map(is_early, calls_to(program.graphs()[0], ops.commit)))
        when = "its own sum is there, while others are in flight" if are_early else "all sums are there"
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

    def busy_ns(step: RecordedStep) -> int:
        before = itertools.takewhile(lambda call: call.node.target is not ops.commit, step.calls[replica])
        in_calls_ns = sum(call.duration_ns for call in before if not is_of(call.node, Kind.WAIT))
        return step.started_ns[replica] - step.begun_ns + in_calls_ns

    return statistics.fmean(busy_ns(step) / 1e6 for step in steps)


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
        gain_ms = saved_ms - num_more * costs.fixed_ms
        candidates.append((gain_ms, f"{change} ({_in_options(f'{cap_bytes / 2**20:.2g}')})"))
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

    calls = [[call for calls in step.calls for call in calls if is_of_bucket(call.node)] for step in steps]
    return statistics.fmean(sum(call.duration_ns for call in of_step) / num_devices / 1e6 for of_step in calls)


def _line(costs: Sequence[tuple[int, float]]) -> Line:
    points = [(float(num_bytes), ms / 1e3) for num_bytes, ms in costs]
    return Line.through(points, nominal=_NOMINAL_SECONDS_PER_BYTE, telling_bytes=_TELLING_BYTES)


_UPDATES = Selection(lambda selected: selected.kind in (Kind.UPDATE, Kind.WRITE))
_NEGLIGIBLE = 0.01  # the smallest part of a step for which a bucket's cause of waiting is named


_INTERLEAVED = (
    "nothing to do: the devices are interleaved in the caller's thread, which is faster for a step this short than waking "
    "theirs; what is exposed is the others' computing."
)


def explain_steps(
    program: Program,
    steps: Sequence[RecordedStep],
    is_interleaved: bool = False,
    foundations: Foundations | None = None,
) -> Explanation:
    looked_at = [step for step in steps if not step.warms_up] or steps
    by_duration = sorted(looked_at, key=lambda step: step.ended_ns - step.begun_ns)
    steps = typical(looked_at)
    step_ms = statistics.fmean((step.ended_ns - step.begun_ns) / 1e6 for step in steps)
    devices = tuple(_device_times(program, steps, replica) for replica in range(program.num_replicas))
    collectives = collectives_of(steps[0])
    buckets = [_bucket_times(program, steps, collective, step_ms) for collective in collectives]
    moved = {bucket.index for bucket in buckets}
    buckets += [_unmoved_bucket(bucket, steps) for bucket in program.buckets if bucket.index not in moved]
    return Explanation(
        num_steps=len(looked_at),
        step_ms=step_ms,
        parts_ms=_mean_over([device.parts_ms for device in devices]),
        fastest_ms=_parts_of_step(program, by_duration[0]),
        slowest_ms=_parts_of_step(program, by_duration[-1]),
        start=_start_of(program, devices, step_ms, is_interleaved),
        hidden_ms=sum(bucket.hidden_ms for bucket in buckets),
        buckets=tuple(buckets),
        devices=devices,
        advice=_INTERLEAVED if is_interleaved else advise(program, steps, step_ms, buckets, devices),
        prediction=predicted_of_steps(program, looked_at, foundations) if foundations is not None else None,
        capture=tuple(remark.text for remark in program.remarks if remark.by == CAPTURE),
    )


def _mean_over(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {part: statistics.fmean(of_device[part] for of_device in parts) for part in PARTS}


def _parts_of_step(program: Program, step: RecordedStep) -> dict[str, float]:
    return _mean_over([mean_parts_ms(program, [step], replica) for replica in range(program.num_replicas)])


def _device_times(program: Program, steps: Sequence[RecordedStep], replica: int) -> DeviceTimes:
    def ms_in(counts: Callable[[fx.Node], bool]) -> float:
        return statistics.fmean(
            sum(c.duration_ns for c in step.calls[replica] if counts(c.node)) / 1e6 for step in steps
        )

    names = dict.fromkeys(call_name(c.node) for c in steps[0].calls[replica] if is_region_call(c.node))
    ends = [max([step.started_ns[replica], *(c.end_ns for c in step.calls[replica])]) for step in steps]
    return DeviceTimes(
        device=program.devices[replica].name,
        started_ms=statistics.fmean((step.started_ns[replica] - step.begun_ns) / 1e6 for step in steps),
        compute_ms=ms_in(is_region_call),
        exposed_ms=ms_in(lambda node: is_of(node, Kind.WAIT)),
        update_ms=ms_in(lambda node: node.target in _UPDATES),
        finished_ms=statistics.fmean((end - step.begun_ns) / 1e6 for end, step in zip(ends, steps, strict=True)),
        parts_ms=mean_parts_ms(program, steps, replica),
        region_ms={name: ms_in(lambda node: call_name(node) == name) for name in names},  # noqa: B023
    )


_OF_COLLECTIVES = ("label", "kind", "link", "pack", "round", "chunk", "source", "destination")
_FIGURES = ("ready_ms", "launched_ms", "waited_ms", "finished_ms", "hidden_ms", "skew_ms", "transfer_ms")


def _flight(step: RecordedStep, launch: Launch, moves_by_itself: bool) -> list[float]:
    launch_call = step.call_of[launch.node]
    launched_ns = launch_call.end_ns
    ready_ns = max((step.call_of[source].end_ns for source in launch.sources), default=launch_call.start_ns)
    wait = step.call_of[launch.wait] if launch.wait is not None else None
    waited_ns, finished_ns = (wait.start_ns, wait.end_ns) if wait is not None else (launched_ns, launched_ns)
    skew = skew_ns(step, launch)
    hidden_ns = waited_ns - launched_ns if moves_by_itself else 0
    points = [point - step.begun_ns for point in (ready_ns, launched_ns, waited_ns, finished_ns)]
    return [ns / 1e6 for ns in (*points, hidden_ns, skew, finished_ns - waited_ns - skew)]


def _bucket_times(
    program: Program, steps: Sequence[RecordedStep], collective: Collective, step_ms: float
) -> BucketTimes:
    moves_by_itself = link_named(collective.link).moves_by_itself
    flights = [[_flight(step, launch, moves_by_itself) for launch in collective.launches] for step in steps]
    join = _message if collective.is_message else _together
    joined = [
        [*moments, *(duration / program.num_replicas for duration in durations)]
        for moments, durations in (join(collective, parts) for parts in flights)
    ]
    devices = [
        DeviceFlight(device=program.devices[launch.replica].name, **_means(parts[i] for parts in flights))
        for i, launch in enumerate(collective.launches)
    ]
    return BucketTimes(
        index=collective.bucket,
        num_bytes=_num_bytes(program, collective),
        behind=_behind(program, steps, collective, step_ms),
        devices=tuple(devices),
        uncompressed_bytes=_uncompressed_bytes(program, collective),
        **{name: getattr(collective, name) for name in _OF_COLLECTIVES},
        **_means(joined),
    )


_Joined = tuple[Sequence[float], Sequence[float]]  # moments, and durations summed over devices


def _together(collective: Collective, parts: Sequence[Sequence[float]]) -> _Joined:
    figures = [*zip(*parts, strict=True)]
    return [statistics.fmean(moments) for moments in figures[:4]], [sum(durations) for durations in figures[4:]]


def _message(collective: Collective, parts: Sequence[Sequence[float]]) -> _Joined:
    """The sender never waits. The launch is at the sender, the wait at the receiver."""
    by_replica = {launch.replica: part for launch, part in zip(collective.launches, parts, strict=True)}
    ready, launched, *_ = by_replica[collective.source]  # type: ignore[index]
    _, received, waited, finished, hidden, skew, transfer = by_replica[collective.destination]  # type: ignore[index]
    hidden = min(hidden, max(0.0, waited - max(launched, received)))
    return [ready, launched, waited, finished], [hidden, skew, transfer]


def _num_bytes(program: Program, collective: Collective) -> int:
    """Counts factors of all devices, and the largest possible number of sparse rows."""
    if collective.kind == ops.all_gather.__name__:
        return sum(map(factor_bytes, packs_of(program, collective.bucket)))
    first = collective.launches[0].node
    if first.target in ops.EXCHANGES_OF_SUMS:
        return num_bytes_sent(program, first)
    sent = next((launch.node for launch in collective.launches if launch.node.target is ops.send), None)
    if sent is None and collective.pack is not None:
        bucket, pack = program.packs[collective.pack]
        return pack.num_elements * bucket.dtype.itemsize
    if sent is None:
        return program.buckets[collective.bucket].num_bytes
    return bytes_of_sent(program, sent)


def _uncompressed_bytes(program: Program, collective: Collective) -> int | None:
    first = collective.launches[0].node
    if first.target not in ops.EXCHANGES_OF_SUMS:
        return None
    bucket, pack = program.packs[pack_of(first)]
    whole = pack.num_elements * bucket.dtype.itemsize
    return whole if first.target in ops.EXCHANGES_OF_PARTS or num_bytes_sent(program, first) != whole else None


def _means(rows: Iterable[Sequence[float]]) -> dict[str, Any]:
    return {name: statistics.fmean(values) for name, values in zip(_FIGURES, zip(*rows, strict=True), strict=True)}


def _unmoved_bucket(bucket: Bucket, steps: Sequence[RecordedStep]) -> BucketTimes:
    packs = [call.node for device_calls in steps[0].calls for call in device_calls if call.node.target is ops.pack]
    packs = [pack for pack in packs if bucket_of(pack) == bucket.index]
    sources = [source for pack in packs for source in sources_of(pack)]
    ready_ms = statistics.fmean(
        max([step.call_of[source].end_ns - step.begun_ns for source in sources], default=0) / 1e6 for step in steps
    )
    figures: dict[str, Any] = dict.fromkeys(_FIGURES[:4], ready_ms) | dict.fromkeys(_FIGURES[4:], 0.0)
    return BucketTimes(
        label=f"b{bucket.index}",
        index=bucket.index,
        num_bytes=bucket.num_bytes,
        kind="none",
        link="",
        behind="",
        devices=(),
        **figures,
    )


def _behind(program: Program, steps: Sequence[RecordedStep], collective: Collective, step_ms: float) -> str:
    spent_ns: Counter[str] = Counter()
    for step in steps:
        for launch in collective.launches:
            if launch.wait is None:
                continue
            begun_ns = step.call_of[launch.wait].start_ns
            replica, last = max(launch.awaited, key=lambda awaited: step.call_of[awaited[1]].end_ns)
            last_ns = step.call_of[last].end_ns
            late = program.devices[replica].name
            spent_ns[f"{late}'s start"] += max(0, min(last_ns, step.started_ns[replica]) - begun_ns)
            for call, ns in _within(step.calls[replica], begun_ns, last_ns):
                spent_ns[f"{late}'s {call_name(call.node)}"] += ns
            for call, ns in _within(step.calls[launch.replica], last_ns, begun_ns):
                spent_ns[call_name(call.node)] += ns if call.node.target is ops.wait else 0
    longest, total_ns = max(spent_ns.items(), key=lambda item: item[1], default=("", 0))
    is_negligible = total_ns / 1e6 < _NEGLIGIBLE * step_ms * len(steps) * program.num_replicas
    return "" if is_negligible else longest


def _within(calls: Iterable[Call], start_ns: int, end_ns: int) -> Iterator[tuple[Call, int]]:
    for call in calls:
        shared_ns = min(call.end_ns, end_ns) - max(call.start_ns, start_ns)
        if shared_ns > 0:
            yield call, shared_ns


_LARGE = 0.1  # of the step, from where it is explained


def _start_of(program: Program, devices: Sequence[DeviceTimes], step_ms: float, is_interleaved: bool) -> str:
    last = max(devices, key=lambda device: device.started_ms)
    if last.started_ms < _LARGE * step_ms:
        return ""
    if is_interleaved:
        return "the devices take turns in the caller's thread, and each begins with its first turn"
    on_cpus = [device for device in program.devices if device.torch_device.type == "cpu"]
    has_copies = len(on_cpus) < len(program.devices)
    text = "the caller wakes the devices' threads"
    text += ", and the batch is copied to the devices" if has_copies else ""
    text += f"; a thread begins when it gets a core and Python's lock. {last.device} is the last, at {last.started_ms:.3f} ms"
    cores = _num_cores()
    if len(on_cpus) > cores:
        text += f": {len(on_cpus)} devices share {counted(cores, 'core')}"
    return text


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
