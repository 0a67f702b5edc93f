"""Explains where the time of recorded steps went, bucket by bucket."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.links import link_named
from mirrorc.ir.nodes import bucket_of, call_name, is_region_call
from mirrorc.ir.operation import Kind, Selection
from mirrorc.ir.program import Program
from mirrorc.printing.values import size_text
from mirrorc.runtime.profiling.advice import advise
from mirrorc.runtime.profiling.collectives import Collective, Launch, collectives_of, sources_of
from mirrorc.runtime.profiling.figures import BucketTimes, DeviceFlight, DeviceTimes, mean_over_devices, median
from mirrorc.runtime.profiling.recorder import Call, RecordedStep

_UPDATES = Selection(lambda found: found.kind in (Kind.UPDATE, Kind.WRITE))
_NEGLIGIBLE = 0.01  # of a step: what a bucket waited behind is not named below it
_TEXT_WIDTH = 110  # rows of the table are as long as what they name


@dataclass(frozen=True)
class Explanation:
    """Where the time of the last recorded steps went; `str` of it is a table.

    Attributes:
        num_steps: so many steps were looked at: those recorded, without the first one of its program if there are others.
        step_ms: from when the caller began to hand the step to the devices until the last device was done; median. What
            the caller does before and after (splitting the batch, showing the optimizer's state) is not in it.
        compute_ms: in regions; mean over devices, as are the next two; median over steps.
        exposed_ms: in waits; the sum of the buckets' ``exposed_ms``.
        update_ms: in the optimizer and in writing variables.
        hidden_ms: sum of the buckets' ``hidden_ms``; buckets that are in flight at the same time each count, so it may be more
            than the step.
        buckets: a collective each, in the order in which they were launched.
        devices: in order of replicas.
        advice: the one change that is estimated to help most, or why there is none.
    """

    num_steps: int
    step_ms: float
    compute_ms: float
    exposed_ms: float
    update_ms: float
    hidden_ms: float
    buckets: tuple[BucketTimes, ...]
    devices: tuple[DeviceTimes, ...]
    advice: str

    @property
    def other_ms(self) -> float:
        """The rest of the step: starting the devices, packing, launching, and waiting for the last device to finish.

        Medians of parts need not add up to that of the whole: where they are more, this is 0.
        """
        return max(0.0, self.step_ms - self.compute_ms - self.exposed_ms - self.update_ms)

    def __str__(self) -> str:
        return "\n".join(
            [*self._summary(), "", *self._bucket_lines(), "", *self._device_lines(), "", *self._advice_lines()]
        )

    def _ms(self, value: float) -> str:
        return f"{value:.{3 if self.step_ms < 10 else 2 if self.step_ms < 1000 else 1}f}"

    def _summary(self) -> list[str]:
        names = ", ".join(device.device for device in self.devices)
        steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
        head = f"A step takes {self._ms(self.step_ms)} ms; median of {steps} on {names}"
        parts = ("compute", "exposed", "update", "other")
        values = (self.compute_ms, self.exposed_ms, self.update_ms, self.other_ms)
        shares = [f"{n} {self._ms(v)} ({v / (self.step_ms or 1.0):.0%})" for n, v in zip(parts, values, strict=True)]
        return [textwrap.shorten(head, _TEXT_WIDTH), f"  {', '.join(shares)}", *self._hidden_lines()]

    def _hidden_lines(self) -> list[str]:
        """What was in flight, which is no part of the step: several buckets may be at the same time."""
        links = list(dict.fromkeys(bucket.link for bucket in self.buckets if bucket.link))
        if not links:
            return []
        idle = [link for link in links if not link_named(link).moves_by_itself]
        moving = (
            f"; {' and '.join(idle)} {'moves' if len(idle) == 1 else 'move'} nothing until the wait" if idle else ""
        )
        said = f"in flight behind compute (hidden) {self._ms(self.hidden_ms)} ms, summed over buckets{moving}"
        return textwrap.wrap(said, _TEXT_WIDTH, initial_indent="  ", subsequent_indent="  ")

    def _bucket_lines(self) -> list[str]:
        columns = ("ready", "launched", "waited", "finished", "hidden", "exposed", "skew", "transfer")
        lines = [f"{'bucket':<6}{'size':>10}{_row(columns)}  behind"]
        heading = ""
        for bucket in self.buckets:
            now = f"{bucket.kind} over {bucket.link}, ms" if bucket.link else "not communicated, ms"
            lines += [now] if now != heading else []
            heading = now
            values = [self._ms(getattr(bucket, f"{column}_ms")) for column in columns]
            row = f"b{bucket.index:<5}{size_text(bucket.num_bytes):>10}{_row(values)}  {bucket.behind}"
            lines.append(row.rstrip())
        return lines

    def _device_lines(self) -> list[str]:
        columns = ("started", "compute", "exposed", "update", "finished")
        lines = [f"{'device':<16}{_row(columns)}"]
        for device in self.devices:
            values = [self._ms(getattr(device, f"{column}_ms")) for column in columns]
            lines.append(f"{device.device:<16}{_row(values)}")
        return lines

    def _advice_lines(self) -> list[str]:
        return textwrap.wrap(f"advice: {self.advice}", _TEXT_WIDTH, subsequent_indent="  ")


def _row(cells: Iterable[str]) -> str:
    return "".join(f"{cell:>9}" for cell in cells)


_INTERLEAVED = (
    "nothing to do: the devices are interleaved in the caller's thread, which is faster for a step this short than waking "
    "theirs; what is exposed is the others' computing."
)


def explain_steps(program: Program, steps: Sequence[RecordedStep], is_interleaved: bool = False) -> Explanation:
    """Explains recorded steps of a lowered program, at least one.

    Args:
        program: the program.
        steps: its steps.
        is_interleaved: whether the devices were interleaved in one thread.
    """
    steps = [step for step in steps if not step.warms_up] or steps
    step_ms = median((step.ended_ns - step.begun_ns) / 1e6 for step in steps)
    devices = tuple(_device_times(program, steps, replica) for replica in range(program.num_replicas))
    collectives = collectives_of(steps[0])
    buckets = [_bucket_times(program, steps, collective, step_ms) for collective in collectives]
    moved = {bucket.index for bucket in buckets}
    buckets += [_unmoved_bucket(bucket, steps) for bucket in program.buckets if bucket.index not in moved]
    return Explanation(
        num_steps=len(steps),
        step_ms=step_ms,
        compute_ms=mean_over_devices(steps, program.num_replicas, is_region_call),
        exposed_ms=sum(bucket.exposed_ms for bucket in buckets),
        update_ms=mean_over_devices(steps, program.num_replicas, lambda node: node.target in _UPDATES),
        hidden_ms=sum(bucket.hidden_ms for bucket in buckets),
        buckets=tuple(buckets),
        devices=devices,
        advice=_INTERLEAVED if is_interleaved else advise(program, steps, step_ms, buckets, devices),
    )


def _device_times(program: Program, steps: Sequence[RecordedStep], replica: int) -> DeviceTimes:
    def ms_in(counts: Callable[[fx.Node], bool]) -> float:
        return median(sum(c.duration_ns for c in step.calls[replica] if counts(c.node)) / 1e6 for step in steps)

    names = dict.fromkeys(call_name(c.node) for c in steps[0].calls[replica] if is_region_call(c.node))
    ends = [max([step.started_ns[replica], *(c.end_ns for c in step.calls[replica])]) for step in steps]
    return DeviceTimes(
        device=program.devices[replica].name,
        started_ms=median((step.started_ns[replica] - step.begun_ns) / 1e6 for step in steps),
        compute_ms=ms_in(is_region_call),
        exposed_ms=ms_in(lambda node: node.target is ops.wait),
        update_ms=ms_in(lambda node: node.target in _UPDATES),
        finished_ms=median((end - step.begun_ns) / 1e6 for end, step in zip(ends, steps, strict=True)),
        region_ms={name: ms_in(lambda node: call_name(node) == name) for name in names},  # noqa: B023
    )


_FIGURES = ("ready_ms", "launched_ms", "waited_ms", "finished_ms", "hidden_ms", "skew_ms", "transfer_ms")


def _flight(step: RecordedStep, launch: Launch) -> list[float]:
    """The figures of a bucket on one device in one step."""
    own = step.call_of[launch.node]
    ready_ns = max((step.call_of[source].end_ns for source in launch.sources), default=own.start_ns)
    wait = step.call_of[launch.wait] if launch.wait is not None else None
    waited_ns, finished_ns = (wait.start_ns, wait.end_ns) if wait is not None else (own.end_ns, own.end_ns)
    last_launch_ns = max(step.call_of[node].end_ns for _, node in launch.awaited)
    skew_ns = min(finished_ns, max(waited_ns, last_launch_ns)) - waited_ns
    points = [point - step.begun_ns for point in (ready_ns, own.end_ns, waited_ns, finished_ns)]
    return [ns / 1e6 for ns in (*points, waited_ns - own.end_ns, skew_ns, finished_ns - waited_ns - skew_ns)]


def _bucket_times(
    program: Program, steps: Sequence[RecordedStep], collective: Collective, step_ms: float
) -> BucketTimes:
    flights = [[_flight(step, launch) for launch in collective.launches] for step in steps]
    is_waiting = [launch.wait is not None for launch in collective.launches]
    together = []
    for parts in flights:
        ready, launched, waited, finished, *durations = zip(*parts, strict=True)
        first = min((w for w, waits in zip(waited, is_waiting, strict=True) if waits), default=max(launched))
        means = [sum(values) / program.num_replicas for values in durations]
        together.append([max(ready), max(launched), first, max(finished), *means])
    devices = [
        DeviceFlight(device=program.devices[launch.replica].name, **_medians(parts[i] for parts in flights))
        for i, launch in enumerate(collective.launches)
    ]
    return BucketTimes(
        index=collective.bucket,
        num_bytes=program.buckets[collective.bucket].num_bytes,
        kind=collective.kind,
        link=collective.link,
        behind=_behind(program, steps, collective, step_ms),
        devices=tuple(devices),
        **_medians(together),
    )


def _medians(rows: Iterable[Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in zip(_FIGURES, zip(*rows, strict=True), strict=True)}


def _unmoved_bucket(bucket: Bucket, steps: Sequence[RecordedStep]) -> BucketTimes:
    """A bucket without a collective: the only device has it already."""
    packs = [call.node for own in steps[0].calls for call in own if call.node.target is ops.pack]
    packs = [pack for pack in packs if bucket_of(pack) == bucket.index]
    sources = [source for pack in packs for source in sources_of(pack)]
    ready = [max([step.call_of[s].end_ns - step.begun_ns for s in sources], default=0) / 1e6 for step in steps]
    times = _medians([value] * 4 + [0.0] * 3 for value in ready)
    return BucketTimes(
        index=bucket.index, num_bytes=bucket.num_bytes, kind="none", link="", behind="", devices=(), **times
    )


def _behind(program: Program, steps: Sequence[RecordedStep], collective: Collective, step_ms: float) -> str:
    """What a bucket waited behind for the longest, over all devices and steps."""
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
    """The calls that a device was in between two moments, with how long."""
    for call in calls:
        shared_ns = min(call.end_ns, end_ns) - max(call.start_ns, start_ns)
        if shared_ns > 0:
            yield call, shared_ns
