"""What a step notes while it runs, and what is made of it."""

from __future__ import annotations

import gc
import itertools
import operator
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from selections import slow_but
from torch import fx, nn

import mirrorc
from mirrorc.errors import ExecutionError
from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.nodes import call_name
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes
from mirrorc.runtime.codegen.graph_function import generate
from mirrorc.runtime.execution.binding.interleaving import NUM_TRIAL_STEPS
from mirrorc.runtime.profiling.collectives import collectives_of, sources_of
from mirrorc.runtime.profiling.recorder import (
    NUM_RECORDED_STEPS,
    Call,
    Clock,
    EventClock,
    RecordedStep,
    Recorder,
    clock_for,
    recorded_steps,
)

PATIENT, IMPATIENT = 60.0, 0.05  # seconds; the latter only where nothing will come


def counter() -> Callable[[], float]:
    count = itertools.count()
    return lambda: next(count) * 1e-9


class CountingClock(Clock):
    """Every mark is a nanosecond after the last; ``now`` may be shared with other clocks."""

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        super().__init__()
        self.begin = self.mark = now or counter()


def times_of(clock: Clock) -> list[list[int]]:
    return [clock.times_ns(marks) for marks in clock.noted()]


def compiled(model: nn.Module, num_devices: int = 2, **options: Any) -> mirrorc.Step:
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "backend": "eager", **options}
    return mirrorc.compile(model, num_devices, loss_fn=nn.functional.mse_loss, **grouped({"timeout": 60.0, **options}))


def recorder_of(step: mirrorc.Step) -> Recorder:
    assert step._runs.last is not None and step._runs.last.recorder is not None
    return step._runs.last.recorder


# The generated function


def double(x: int) -> int:
    return 2 * x


def halves(box: list[int]) -> list[int]:
    (x,) = box
    box.clear()
    return [x // 2, x - x // 2]


def small_graph() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(double, (x,))
    parts = graph.call_function(halves, (doubled,))
    first, second = (graph.call_function(operator.getitem, (parts, i)) for i in range(2))
    graph.call_function(double, (first,))  # unused
    graph.output(graph.call_function(operator.sub, (second, first)))
    return graph


def generated(clock: Clock | None) -> Any:
    return generate("test", small_graph(), lambda n: n.target, boxed=lambda n: n.target is halves, clock=clock)


def test_every_call_is_marked_once_in_order() -> None:
    clock = CountingClock()
    function = generated(clock)
    assert [node.target for node in function.marked] == [double, halves, double, operator.sub]
    for _ in range(2):
        assert function.call([3]) == 0
    assert times_of(clock) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_function_that_fails_notes_nothing() -> None:
    clock = CountingClock()
    with pytest.raises(TypeError):
        generated(clock).call([None])
    assert clock.noted() == [] and clock.mark() == 1e-9, "it had begun"


def test_without_a_clock_there_is_no_trace_of_marks() -> None:
    function = generated(None)
    assert function.call([3]) == 0 and function.marked == []
    assert not {"begin", "mark", "note"} & {*function.namespace, *re.findall(r"[a-z]+", function.source)}
    with_marks = generated(CountingClock()).source.split("\n")
    kept = [line for line in with_marks if not re.search(r"begin\(|mark\(|note\(", line)]
    assert kept[1:] == function.source.split("\n")[1:]


# The recorder


def recorder_with(num_devices: int) -> tuple[Recorder, fx.Node]:
    now, node = counter(), fx.Graph().call_function(double, (1,))
    recorder = Recorder([CountingClock(now) for _ in range(num_devices)], now)
    recorder.nodes = [[node]] * num_devices
    return recorder, node


def run_device(recorder: Recorder, replica: int) -> None:
    clock = recorder.clocks[replica]
    clock.note((clock.begin(), clock.mark()))


def run_steps(recorder: Recorder, num_steps: int) -> None:
    for _ in range(num_steps):
        recorder.begin()
        for replica in range(len(recorder.clocks)):
            run_device(recorder, replica)


def test_steps_are_put_together() -> None:
    recorder, node = recorder_with(2)
    assert recorder.steps() == () and not recorder.has_begun
    run_steps(recorder, 2)
    assert recorder.steps() == (
        RecordedStep(True, 0, (1, 3), ((Call(node, 1, 2),), (Call(node, 3, 4),))),
        RecordedStep(False, 5, (6, 8), ((Call(node, 6, 7),), (Call(node, 8, 9),))),
    )
    assert recorder.steps()[0].ended_ns == 4 and recorder.has_begun


@pytest.mark.parametrize("num_steps", [1, 2, 31, 32, 33, 34, 70])
def test_the_last_steps_are_kept(num_steps: int) -> None:
    recorder, _ = recorder_with(2)
    run_steps(recorder, num_steps)
    steps = recorder.steps()
    assert [step.begun_ns for step in steps] == [5 * i for i in range(max(0, num_steps - 32), num_steps)]
    assert [step.warms_up for step in steps] == [num_steps <= 32 and i == 0 for i in range(len(steps))]


def test_a_step_that_a_device_did_not_finish_is_not_kept() -> None:
    recorder, _ = recorder_with(2)
    recorder.begin()
    run_device(recorder, 0)  # device 1 never came so far
    assert recorder.steps() == ()
    recorder.forget()
    run_steps(recorder, 1)
    recorder.begin()
    run_device(recorder, 1)
    recorder.forget()
    recorder.forget()  # who stops a step may say so twice
    run_steps(recorder, 1)
    recorder.begin()  # and one that is going on
    assert [(step.begun_ns, step.started_ns, step.warms_up) for step in recorder.steps()] == [
        (3, (4, 6), True),
        (11, (12, 14), False),
    ]


def test_a_step_that_was_stopped_is_not_kept_though_all_devices_finish_it() -> None:
    recorder, _ = recorder_with(2)
    recorder.begin()
    run_device(recorder, 0)
    recorder.forget()
    run_device(recorder, 1)
    assert recorder.steps() == ()


def test_failures_push_out_what_came_before() -> None:
    """A device that failed notes nothing, so that its last steps may be older than those of others."""
    recorder, _ = recorder_with(2)
    run_steps(recorder, 2)
    for i in range(40):
        assert len(recorder.steps()) == max(0, min(2, 32 - i))
        recorder.begin()
        run_device(recorder, 0)
        recorder.forget()
    run_steps(recorder, 1)
    (step,) = recorder.steps()
    assert step.begun_ns == 2 * 5 + 40 * 3 and not step.warms_up


def test_a_step_that_failed_counts_among_the_last() -> None:
    recorder, _ = recorder_with(2)
    run_steps(recorder, 5)
    recorder.begin()  # neither device notes anything: both still have the marks of the first step
    recorder.forget()
    run_steps(recorder, NUM_RECORDED_STEPS - 5)
    assert len(recorder.steps()) == NUM_RECORDED_STEPS - 1
    assert not any(step.warms_up for step in recorder.steps())


def test_anyone_may_look_while_steps_are_run() -> None:
    recorder, _ = recorder_with(2)
    stop, wrong = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            begun = [step.begun_ns for step in recorder.steps()]
            if any(other - one != 5 for one, other in itertools.pairwise(begun)):
                wrong.append(begun)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        run_steps(recorder, 3000)
    finally:
        stop.set()
        thread.join(timeout=60.0)
    assert not wrong and [step.begun_ns for step in recorder.steps()] == [
        5 * i for i in range(3000 - NUM_RECORDED_STEPS, 3000)
    ]


def test_no_record_says_why() -> None:
    recorder, _ = recorder_with(1)
    for none in (None, recorder):
        with pytest.raises(
            ExecutionError,
            match=r"MC5005: no call was recorded, and a report needs one training call with this program",
        ):
            recorded_steps(none)
    recorder.begin()
    with pytest.raises(
        ExecutionError, match=r"each that began .* failed or was interrupted\n  fix:  make one call that succeeds"
    ):
        recorded_steps(recorder)
    run_steps(recorder, 1)
    assert len(recorded_steps(recorder)) == 1


# Clocks


class FakeGpu:
    """Queues events, which happen ``lag_ms`` after they are recorded, on a clock that has nothing to do with the host's.

    The host's clock goes on by 1.5 ms with every event that is recorded.
    """

    def __init__(self, lag_ms: float = 0.0, offset_ms: float = 7000.0) -> None:
        self.lag_ms, self.offset_ms = lag_ms, offset_ms
        self.host_ms = 1000.0
        self.log: list[str] = []
        self.events: list[FakeEvent] = []

    def clock(self) -> EventClock:
        return EventClock(torch.device("meta"), PATIENT, self.make_event, lambda: self.host_ms / 1e3)

    def make_event(self) -> FakeEvent:
        self.events.append(FakeEvent(self))
        return self.events[-1]


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self.happens_ms = gpu, -1.0
        self._is_waited_for = False

    def record(self) -> None:
        self._gpu.host_ms += 1.5
        self.happens_ms = self._gpu.host_ms + self._gpu.lag_ms
        self._gpu.log.append("record")

    def synchronize(self) -> None:
        self._gpu.host_ms = max(self._gpu.host_ms, self.happens_ms)
        self._gpu.log.append("synchronize")

    def elapsed_time(self, end: FakeEvent) -> float:
        assert end._gpu is self._gpu, "times of two GPUs cannot be compared"
        assert max(self.happens_ms, end.happens_ms) <= self._gpu.host_ms, "an event has no time before it has happened"
        assert abs(self.happens_ms - end.happens_ms) < 2**14, "a 32-bit number does not tell microseconds there"
        return (end.happens_ms + self._gpu.offset_ms) - (self.happens_ms + self._gpu.offset_ms)


def test_events_become_times_of_the_host_only_when_asked_for() -> None:
    gpu = FakeGpu()
    clock = gpu.clock()
    marks = (clock.begin(), clock.mark(), clock.mark())
    assert gpu.log == ["record"] * 3
    assert clock.begun_seconds(marks) == 1.0 and gpu.log == ["record"] * 3
    for _ in range(2):
        assert clock.times_ns(marks) == [1_001_500_000, 1_003_000_000, 1_004_500_000]
    waits = ["synchronize", "record", "synchronize", "synchronize"]
    assert gpu.log == ["record"] * 3 + waits, "one wait for the last event each time, and one for the anchor"


@pytest.mark.slow
@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=3), st.floats(0.0, 60_000.0))
@fuzzed(10)
def test_times_of_gpus_agree_however_far_each_lags_behind(lags: list[float], idle_ms: float) -> None:
    """An hour without a question must not make the times coarse, either."""
    for i, lag_ms in enumerate(lags):
        gpu = FakeGpu(lag_ms, offset_ms=1e5 * i)
        clock = gpu.clock()
        for _ in range(3):
            marks = (clock.begin(), clock.mark(), clock.mark())
            happened = [mark.happens_ms for mark in (marks[0][1], *marks[1:])]
            assert clock.times_ns(marks) == pytest.approx([ms * 1e6 for ms in happened], abs=2)
            gpu.host_ms += idle_ms


def test_a_gpu_that_hangs_is_not_asked_for_its_times_for_ever() -> None:
    comes, gpu = threading.Event(), FakeGpu()

    class HangingEvent(FakeEvent):
        def synchronize(self) -> None:
            assert comes.wait(PATIENT)
            super().synchronize()

    clock = EventClock(torch.device("meta"), IMPATIENT, lambda: HangingEvent(gpu), lambda: gpu.host_ms / 1e3)
    marks = (clock.begin(), clock.mark())
    with pytest.raises(
        ExecutionError, match=r"meta has not done what was queued on it within 0\.05 s\n.*\n  fix:  close\(\)"
    ):
        clock.times_ns(marks)
    comes.set()


def test_a_step_of_events_alone_and_before_the_anchor() -> None:
    gpu = FakeGpu()
    clock = gpu.clock()
    early, late = (clock.begin(),), (clock.begin(),)
    assert clock.times_ns(late) == [1_003_000_000]
    assert clock.times_ns(early) == [1_001_500_000], "by the same anchor"


def test_events_of_steps_that_nobody_keeps_are_used_again() -> None:
    gpu = FakeGpu()
    clock = gpu.clock()
    clock.note((clock.begin(), clock.mark()))
    read = clock.noted()[0]
    for _ in range(3 * NUM_RECORDED_STEPS):
        clock.note((clock.begin(), clock.mark()))
    assert len(gpu.events) == 2 * (NUM_RECORDED_STEPS + 2), (
        "those of the kept steps, of the next one, and of the one that is read"
    )
    assert clock.times_ns(read)[0] == 1_001_500_000, "whoever reads a step finds its events as they were"


def test_devices_have_the_clocks_of_their_kind() -> None:
    assert type(clock_for(Device("cpu:0", torch.device("cpu")), PATIENT)) is Clock
    assert isinstance(clock_for(Device("cuda:0", torch.device("cuda:0")), PATIENT), EventClock)


def test_the_hosts_clock_goes_forward() -> None:
    clock = Clock()
    times = clock.times_ns((clock.begin(), *(clock.mark() for _ in range(50))))
    assert len(times) == 51 and times == sorted(times) and all(type(ns) is int for ns in times)


# Steps that run


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    now = counter()
    monkeypatch.setattr("mirrorc.compilation.step_compiler.clock_for", lambda device, seconds: CountingClock(now))
    monkeypatch.setattr("mirrorc.compilation.step_compiler.Recorder", lambda clocks: Recorder(clocks, now=now))
    yield


def calls_of(graph: fx.Graph) -> list[fx.Node]:
    silent = (ops.read, ops.slot, operator.getitem)
    return [n for n in graph.nodes if n.op not in ("placeholder", "output") and n.target not in silent]


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("num_devices", slow_but([1, 3], [1, 2, 3]))
def test_a_step_notes_every_call_of_every_device(num_devices: int) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with compiled(model, num_devices, buckets=ByBytes(1e-4, 1e-4)) as step:
        for _ in range(3):
            step(torch.randn(7, 3), target=torch.randn(7, 2))
        steps = recorder_of(step).steps()
        assert [recorded.warms_up for recorded in steps] == [True, False, False]
        for recorded in steps:
            num_marks = 1 + sum(1 + len(own) for own in recorded.calls)
            assert recorded.ended_ns - recorded.begun_ns == num_marks - 1, "nothing but marks of this step took a time"
            for graph_module, started, own in zip(
                step.graphs.values(), recorded.started_ns, recorded.calls, strict=True
            ):
                assert [call.node for call in own] == calls_of(graph_module.graph)
                times = [started, *(call.end_ns for call in own)]
                assert [(call.start_ns, call.end_ns) for call in own] == list(itertools.pairwise(times))
                assert recorded.begun_ns < started and all(call.duration_ns > 0 for call in own)


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_records_go_on_when_memory_is_laid_out_anew() -> None:
    model = nn.Linear(3, 2)
    with compiled(model) as step:
        step(torch.randn(4, 3), target=torch.randn(4, 2))
        executor = step._runs.last
        assert executor is not None
        functions = list(executor.functions.whole)
        step._state._held.layout += 1  # as a program with another bucket plan would
        step(torch.randn(4, 3), target=torch.randn(4, 2))
        assert step._runs.last is executor and executor.functions.whole[0] is not functions[0]
        first, second = recorder_of(step).steps()
        assert [c.node for c in first.calls[1]] == [c.node for c in second.calls[1]]
        assert second.begun_ns == first.ended_ns + 1, "the clock is the same"


@pytest.mark.slow
def test_each_program_has_its_own_record() -> None:
    model = nn.Linear(3, 2)
    with compiled(model) as step:
        step(torch.randn(4, 3), target=torch.randn(4, 2))
        first = recorder_of(step)
        for _ in range(2):
            step(torch.randn(6, 3), target=torch.randn(6, 2))
        second = recorder_of(step)
        assert second is not first and [len(r.steps()) for r in (first, second)] == [1, 2]
        step(torch.randn(4, 3), target=torch.randn(4, 2))
        assert recorder_of(step) is first and [len(r.steps()) for r in (first, second)] == [2, 2]


@pytest.mark.slow
def test_no_more_than_the_last_steps_are_kept_and_nothing_outlives_the_step() -> None:
    model = nn.Linear(3, 2)
    step = compiled(model)
    for _ in range(NUM_TRIAL_STEPS + NUM_RECORDED_STEPS + 3):  # whose records are forgotten when the way changes
        step(torch.ones(4, 3), target=torch.ones(4, 2))
    steps = recorder_of(step).steps()
    assert len(steps) == NUM_RECORDED_STEPS and not any(recorded.warms_up for recorded in steps)
    reference = weakref.ref(recorder_of(step))
    step.close()
    del step
    gc.collect()
    assert reference() is None


# What calls are, and what they belong to


def test_calls_have_names() -> None:
    graph = fx.Graph()
    value = graph.placeholder("x")
    named = {
        "bwd_1": graph.call_module("bwd_1", (value,)),
        "wait b2": graph.call_function(ops.wait, (value,), {"bucket": 2}),
        "write bn.running_mean": graph.call_function(ops.write, (value,), {"variable": "bn.running_mean"}),
        "step_optimizer": graph.call_function(ops.step_optimizer, (value,), {"buckets": (0,)}),
    }
    assert [call_name(node) for node in named.values()] == list(named)


def lowered_broadcast(num_devices: int) -> RecordedStep:
    calls = []
    for replica in range(num_devices):
        graph = fx.Graph()
        region = graph.call_module("bwd_0", ())
        gradient = graph.call_function(operator.getitem, (region, 0))
        packed = graph.call_function(ops.pack, (gradient,), {"bucket": 0})
        cast = graph.call_function(torch.ops.aten._to_copy.default, (packed,), {"dtype": torch.bfloat16})
        pending = graph.call_function(ops.all_reduce, (cast,), {"bucket": 0, "op": "sum", "link": "nccl"})
        total = graph.call_function(ops.wait, (pending,), {"bucket": 0})
        nodes = [region, packed, cast, pending, total]
        token = []
        if replica == 1:
            token = [graph.call_function(ops.step_optimizer, (total,), {"buckets": (0,)})]
        shared = graph.call_function(ops.broadcast, tuple(token), {"bucket": 0, "root": 1, "link": "copy"})
        nodes += [*token, shared, graph.call_function(ops.wait, (shared,), {"bucket": 0})]
        calls.append(tuple(Call(node, 10 * i, 10 * i + 10) for i, node in enumerate(nodes)))
    return RecordedStep(True, 0, (0,) * num_devices, tuple(calls))


def test_collectives_are_found_on_all_devices() -> None:
    step = lowered_broadcast(3)
    reduced, shared = collectives_of(step)
    assert (reduced.kind, reduced.bucket, reduced.link) == ("all_reduce", 0, "nccl")
    assert (shared.kind, shared.bucket, shared.link) == ("broadcast", 0, "copy")
    for replica in range(3):
        launch = reduced.launches[replica]
        assert launch.replica == replica and launch.sources == (step.calls[replica][0].node,)
        assert launch.wait is step.calls[replica][4].node
        assert launch.awaited == tuple((r, step.calls[r][3].node) for r in range(3))
        root = [(1, call.node) for call in step.calls[1] if call.node.target is ops.broadcast]
        assert list(shared.launches[replica].awaited) == root, "only the root is waited for"
    assert [node.target for node in shared.launches[1].sources] == [ops.step_optimizer]
    assert shared.launches[0].sources == ()


def test_factors_are_looked_through_for_the_region_that_makes_them() -> None:
    for factored in ops.FACTORED:
        graph = fx.Graph()
        region = graph.call_module("bwd_0", ())
        factors = tuple(graph.call_function(operator.getitem, (region, place)) for place in range(2))
        gradient = graph.call_function(factored, factors, {"bucket": 0, "variable": "w"})
        packed = graph.call_function(ops.pack, (gradient,), {"bucket": 0})
        pending = graph.call_function(ops.reduce_scatter, (packed,), {"bucket": 0, "op": "sum", "link": "copy"})
        assert set(sources_of(pending)) == {region}, f"{factored.__name__} hides what makes the gradient"
