"""Explains the time of recorded steps."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import fx

from mirrorc.analysis.communication.compressed_sums import num_bytes_sent
from mirrorc.analysis.gradients.sent_factors import factor_bytes, packs_of
from mirrorc.analysis.gradients.sparse_update_rows import bytes_of_sent
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.links import link_named
from mirrorc.ir.nodes import bucket_of, call_name, is_of, is_region_call, pack_of
from mirrorc.ir.operation import Kind, Selection
from mirrorc.ir.program import CAPTURE, Program
from mirrorc.messages.wording import counted
from mirrorc.runtime.profiling.accounting import PARTS, mean_parts_ms, typical
from mirrorc.runtime.profiling.advice import advise
from mirrorc.runtime.profiling.collectives import Collective, Launch, collectives_of, skew_ns, sources_of
from mirrorc.runtime.profiling.explanation import Explanation
from mirrorc.runtime.profiling.figures import BucketTimes, DeviceFlight, DeviceTimes
from mirrorc.runtime.profiling.prediction import Foundations, predicted_of_steps
from mirrorc.runtime.profiling.recorder import Call, RecordedStep

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


_FIGURES = ("ready_ms", "launched_ms", "waited_ms", "finished_ms", "hidden_ms", "skew_ms", "transfer_ms")


def _flight(step: RecordedStep, launch: Launch, moves_by_itself: bool) -> list[float]:
    launch_call = step.call_of[launch.node]
    ready_ns = max((step.call_of[source].end_ns for source in launch.sources), default=launch_call.start_ns)
    wait = step.call_of[launch.wait] if launch.wait is not None else None
    waited_ns, finished_ns = (
        (wait.start_ns, wait.end_ns) if wait is not None else (launch_call.end_ns, launch_call.end_ns)
    )
    skew = skew_ns(step, launch)
    hidden_ns = waited_ns - launch_call.end_ns if moves_by_itself else 0
    points = [point - step.begun_ns for point in (ready_ns, launch_call.end_ns, waited_ns, finished_ns)]
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
        label=collective.label,
        index=collective.bucket,
        num_bytes=_num_bytes(program, collective),
        kind=collective.kind,
        link=collective.link,
        behind=_behind(program, steps, collective, step_ms),
        devices=tuple(devices),
        pack=collective.pack,
        round=collective.round,
        chunk=collective.chunk,
        source=collective.source,
        destination=collective.destination,
        uncompressed_bytes=_uncompressed_bytes(program, collective),
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


def _means(rows: Iterable[Sequence[float]]) -> dict[str, float]:
    return {name: statistics.fmean(values) for name, values in zip(_FIGURES, zip(*rows, strict=True), strict=True)}


def _unmoved_bucket(bucket: Bucket, steps: Sequence[RecordedStep]) -> BucketTimes:
    packs = [call.node for device_calls in steps[0].calls for call in device_calls if call.node.target is ops.pack]
    packs = [pack for pack in packs if bucket_of(pack) == bucket.index]
    sources = [source for pack in packs for source in sources_of(pack)]
    ready_ms = statistics.fmean(
        max([step.call_of[source].end_ns - step.begun_ns for source in sources], default=0) / 1e6 for step in steps
    )
    return BucketTimes(
        label=f"b{bucket.index}",
        index=bucket.index,
        num_bytes=bucket.num_bytes,
        kind="none",
        link="",
        behind="",
        devices=(),
        ready_ms=ready_ms,
        launched_ms=ready_ms,
        waited_ms=ready_ms,
        finished_ms=ready_ms,
        hidden_ms=0.0,
        skew_ms=0.0,
        transfer_ms=0.0,
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


def _start_of(program: Program, devices: Sequence[DeviceTimes], step_ms: float, is_interleaved: bool = False) -> str:
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
