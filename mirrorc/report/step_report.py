"""The data of a report: a step's calls and messages, and the results of `explain` and `memory`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.links import link_named
from mirrorc.ir.nodes import call_name, calls_to, is_region_call
from mirrorc.ir.program import Program
from mirrorc.printing.bucket_table import ready_after
from mirrorc.printing.function_text import function_names
from mirrorc.printing.graph_text import graph_lines
from mirrorc.printing.printed_values import dtype_name, size_text
from mirrorc.runtime.memory.report import MemoryReport
from mirrorc.runtime.profiling.accounting import part_of
from mirrorc.runtime.profiling.collectives import Collective, collectives_of, skew_ns
from mirrorc.runtime.profiling.explanation import Explanation
from mirrorc.runtime.profiling.recorder import RecordedStep


@dataclass(frozen=True)
class ReportedCall:
    """A device's call. Times are milliseconds from the beginning of the step.

    Attributes:
        part: see `mirrorc.runtime.profiling.accounting.PARTS`.
        late_ms: time that a wait or commit waits for the last device; 0 for other calls.
        line: the call's line number in the printed program.
        flight: an index in `StepReport.flights`, for a launch or a wait.
        num_bytes: peak bytes of activations, sums and messages during the call; None if unknown.
    """

    name: str
    part: str
    start_ms: float
    end_ms: float
    late_ms: float
    line: int
    flight: int | None
    num_bytes: int | None


@dataclass(frozen=True)
class Lane:
    device: str
    num_examples: int | None
    started_ms: float
    calls: tuple[ReportedCall, ...]


@dataclass(frozen=True)
class Arrival:
    """A wait on ``replica``, and the last launch that it needs, on ``source``."""

    source: int
    launched_ms: float
    replica: int
    waited_ms: float
    finished_ms: float


@dataclass(frozen=True)
class Flight:
    """A collective or message in flight.

    Attributes:
        filled_ms: the start of the first region that fills the bucket; without one, ``first_ms``.
        first_ms, last_ms: the ends of the first and the last launch.
        moves_by_itself: False for a link without transfers before the wait.
    """

    label: str
    bucket: int
    kind: str
    link: str
    num_bytes: int
    filled_ms: float
    first_ms: float
    last_ms: float
    moves_by_itself: bool
    arrivals: tuple[Arrival, ...]

    @property
    def waited_ms(self) -> float:
        """The beginning of the first wait, but not before the last launch."""
        return max(self.last_ms, min((arrival.waited_ms for arrival in self.arrivals), default=self.last_ms))

    @property
    def finished_ms(self) -> float:
        return max([self.last_ms, *(arrival.finished_ms for arrival in self.arrivals)])


@dataclass(frozen=True)
class ReportedBucket:
    """A row of the bucket table. ``line`` is its line number in the printed program."""

    index: int
    line: int
    size: str
    dtype: str
    num_gradients: int
    rule: str
    ready_after: str
    first_gradients: str


@dataclass(frozen=True)
class ReportedProgram:
    """A program's printed form without folded lines, and its bucket table."""

    text: str
    buckets: tuple[ReportedBucket, ...]
    remarks: tuple[str, ...]
    is_one_of_several: bool


@dataclass(frozen=True)
class Commit:
    """The time at which the last device reaches the commit."""

    ms: float
    device: str


@dataclass(frozen=True)
class StepReport:
    """A report's data. A saved program has no ``memory``, and no ``explanation`` if its step cannot be predicted.

    Attributes:
        prediction: the basis of predicted times; empty for recorded times.
        metrics: see `mirrorc.Step.metrics`.
    """

    facts: Mapping[str, str]
    program: ReportedProgram
    prediction: str
    step_ms: float
    lanes: tuple[Lane, ...]
    flights: tuple[Flight, ...]
    commit: Commit | None
    explanation: Explanation | None
    memory: MemoryReport | None
    metrics: Mapping[str, float]


_LISTED = 3  # gradients of a bucket


def step_report(
    program: Program,
    step: RecordedStep,
    explanation: Explanation,
    memory: MemoryReport | None,
    facts: Mapping[str, str],
    metrics: Mapping[str, float],
    prediction: str = "",
) -> StepReport:
    printed = reported_program(program)
    commit = _commit(program, step)
    collectives = collectives_of(step)
    return StepReport(
        facts=facts,
        program=printed,
        prediction=prediction,
        step_ms=(step.ended_ns - step.begun_ns) / 1e6,
        lanes=tuple(_lanes(program, step, collectives, commit, _numbers_of_lines(program, printed.text), memory)),
        flights=tuple(
            _flight(step, collective, times.label, times.num_bytes)
            for collective, times in zip(collectives, explanation.buckets, strict=False)
        ),
        commit=commit,
        explanation=explanation,
        memory=memory,
        metrics=metrics,
    )


def reported_program(program: Program) -> ReportedProgram:
    text = program.to_text(fold=False)
    return ReportedProgram(
        text=text,
        buckets=tuple(_buckets(program, text)),
        remarks=tuple(str(remark) for remark in program.remarks if remark.is_kept),
        is_one_of_several=program.workers.are_several,
    )


def _buckets(program: Program, text: str) -> Iterator[ReportedBucket]:
    numbers = (number for number, line in enumerate(text.split("\n"), 1) if line.startswith("# bucket "))
    ready = ready_after(program)
    for bucket, number in zip(program.buckets, numbers, strict=True):
        listed = [f"{slot.variable}{list(slot.shape)}" for slot in bucket.slots[:_LISTED]]
        owner = f", {program.devices[bucket.owner].name}" if bucket.owner is not None else ""
        yield ReportedBucket(
            index=bucket.index,
            line=number,
            size=size_text(bucket.num_bytes),
            dtype=dtype_name(bucket.dtype),
            num_gradients=len(bucket.slots),
            rule=bucket.rule.label + owner,
            ready_after=ready.get(max(pack.number for pack in bucket.launch_units), ""),
            first_gradients=", ".join(listed) + (" …" if len(bucket.slots) > _LISTED else ""),
        )


def _numbers_of_lines(program: Program, text: str) -> list[Mapping[fx.Node, int]]:
    lines = text.split("\n")
    numbers: list[Mapping[fx.Node, int]] = []
    for name, module in zip(function_names(program), program.device_graphs.values(), strict=True):
        nodes = [line.node for line in graph_lines(program, module.graph)][:-1]  # without the return
        start = next(i for i, line in enumerate(lines) if line.startswith(f"def {name}("))
        calls = (i + 1 for i in range(start + 1, len(lines)) if not lines[i].startswith("    # "))
        of_node = dict(zip(nodes, calls, strict=False))
        for node in calls_to(module.graph, ops.write):  # all on one line
            of_node.setdefault(node, next(n for other, n in of_node.items() if other.target is ops.write))
        numbers.append(of_node)
    return numbers


def _lanes(
    program: Program,
    step: RecordedStep,
    collectives: Sequence[Collective],
    commit: Commit | None,
    numbers: Sequence[Mapping[fx.Node, int]],
    memory: MemoryReport | None,
) -> list[Lane]:
    flights, late = {}, {}
    for place, collective in enumerate(collectives):
        for launch in collective.launches:
            flights[launch.node] = place
            if launch.wait is not None:
                flights[launch.wait], late[launch.wait] = place, skew_ns(step, launch) / 1e6
    lanes = []
    for replica, device_calls in enumerate(step.calls):
        most = memory.devices[replica].within_calls if memory is not None else {}
        calls = []
        for call in device_calls:
            start, end = _ms(step, call.start_ns), _ms(step, call.end_ns)
            late_ms = late.get(call.node, 0.0)
            if commit is not None and call.node.target is ops.commit:
                late_ms = min(end, commit.ms) - start
            calls.append(
                ReportedCall(
                    name=call_name(call.node),
                    part=part_of(program, call.node),
                    start_ms=start,
                    end_ms=end,
                    late_ms=late_ms,
                    line=numbers[replica].get(call.node, 0),
                    flight=flights.get(call.node),
                    num_bytes=most.get(call.node.name),
                )
            )
        examples = program.num_examples[replica] if len(program.num_examples) == program.num_replicas else None
        lanes.append(Lane(program.devices[replica].name, examples, _ms(step, step.started_ns[replica]), tuple(calls)))
    return lanes


def _ms(step: RecordedStep, ns: int) -> float:
    return (ns - step.begun_ns) / 1e6


def _commit(program: Program, step: RecordedStep) -> Commit | None:
    begun = [
        (call.start_ns, program.devices[replica].name)
        for replica, device_calls in enumerate(step.calls)
        for call in device_calls
        if call.node.target is ops.commit
    ]
    return Commit(_ms(step, max(begun)[0]), max(begun)[1]) if begun else None


def _flight(step: RecordedStep, collective: Collective, label: str, num_bytes: int) -> Flight:
    launches = [step.call_of[launch.node] for launch in collective.launches]
    arrivals = []
    for launch in collective.launches:
        if launch.wait is not None:
            wait = step.call_of[launch.wait]
            source, last = max(launch.awaited, key=lambda awaited: step.call_of[awaited[1]].end_ns)
            times = [_ms(step, ns) for ns in (step.call_of[last].end_ns, wait.start_ns, wait.end_ns)]
            arrivals.append(Arrival(source, times[0], launch.replica, times[1], times[2]))
    sources = [source for launch in collective.launches for source in launch.sources]
    begun = [step.call_of[source].start_ns for source in sources if is_region_call(source) and not collective.round]
    ends = [call.end_ns for call in launches]
    return Flight(
        label=label,
        bucket=collective.bucket,
        kind=collective.kind,
        link=collective.link,
        num_bytes=num_bytes,
        filled_ms=_ms(step, min([*begun, min(ends)])),
        first_ms=_ms(step, min(ends)),
        last_ms=_ms(step, max(ends)),
        moves_by_itself=link_named(collective.link).moves_by_itself,
        arrivals=tuple(arrivals),
    )


def metrics_of(explanation: Explanation, memory: MemoryReport | None = None) -> dict[str, float]:
    """The figures of `mirrorc.Step.metrics`, without counts of calls."""
    times = {"step": explanation.step_ms, "compute": explanation.compute_ms, "exposed": explanation.exposed_ms}
    times |= {"hidden": explanation.hidden_ms, **explanation.parts_ms}
    moved = [bucket for bucket in explanation.buckets if bucket.link]
    figures = {f"time/{name}_ms": ms for name, ms in times.items()}
    figures["communication/sent_bytes"] = float(sum(bucket.num_bytes for bucket in moved))
    figures["communication/launches"] = float(len(moved))
    if memory is not None:
        figures["memory/peak_bytes"] = float(memory.total)
        figures["memory/activations_bytes"] = float(memory.activations)
    return figures
