"""Traces are valid, and show what was recorded."""

import gzip
import itertools
import json
import operator
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from tiny_programs import SMALL_BUCKETS, handmade
from torch import fx

from mirrorc.all_reduce_algorithms import Ring
from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.runtime.profiling.recorder import Call, RecordedStep
from mirrorc.runtime.profiling.timeline import trace_events, write_timeline

_PROGRAMS: dict[int, Program] = {}


def program_of(num_devices: int = 2) -> Program:
    if num_devices not in _PROGRAMS:
        _PROGRAMS[num_devices] = run_passes(handmade(num_devices), default_pipeline(**SMALL_BUCKETS))  # type: ignore[arg-type]
    return _PROGRAMS[num_devices]


def called(graph: fx.Graph) -> list[fx.Node]:
    silent = (ops.read, ops.slot, operator.getitem)
    return [n for n in graph.nodes if n.op not in ("placeholder", "output") and n.target not in silent]


def step_of(program: Program, begun_ns: int = 0, seed: int | None = None) -> RecordedStep:
    draw = random.Random(seed)
    calls, started = [], []
    for replica, module in enumerate(program.device_graphs.values()):
        now = begun_ns + 500 * (replica + 1)
        started.append(now)
        own = []
        for node in called(module.graph):
            begin, now = now, now + (1000 if seed is None else draw.choice([0, draw.randrange(10**7)]))
            own.append(Call(node, begin, now))
        calls.append(tuple(own))
    return RecordedStep(False, begun_ns, tuple(started), tuple(calls))


def check(events: list[dict[str, Any]]) -> None:
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert len(set(order.values())) == len(tracks) == len(set(tracks.values()))
    slices, flights = defaultdict(list), defaultdict(list)
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= event.keys() and event["pid"] == events[0]["pid"]
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["ts"] >= 0
            slices[event["tid"]].append((round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)))
        elif event["ph"] in "be":
            flights[event["cat"], event["id"], event["name"]].append((event["ph"], event["ts"]))
        else:
            assert event["ph"] == "M"
    assert set(slices) | {event["tid"] for event in events if event["ph"] == "b"} == set(tracks)
    for own in slices.values():
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(sorted(own)))
    for own in flights.values():
        (first, began), (last, ended) = own
        assert (first, last) == ("b", "e") and ended >= began >= 0


def test_tracks_slices_and_flights() -> None:
    program = program_of()
    events = trace_events(program, [step_of(program), step_of(program, 40_000)])
    check(events)
    assert [e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")] == [
        "mirrorc", "steps", "cpu:0", "cpu:1", "shared-memory",
    ]  # fmt: skip
    steps = [(e["name"], e["ts"], e["dur"]) for e in events if e["tid"] == 1 and e["ph"] == "X"]
    length = 1.0 + len(called(program.device_graphs["cpu:1"].graph))
    assert steps == [("step 0", 0.0, length), ("step 1", 40.0, length)]
    first = [e for e in events if e["tid"] == 3 and e["ph"] == "X" and e["ts"] < 40.0]
    names = [e["name"] for e in first]
    assert names[:5] == ["start", "fwd_0", "bwd_0", "pack b0", "reduce_scatter b0"]
    assert (first[0]["ts"], first[0]["dur"]) == (0.0, 1.0)
    assert [e["ts"] for e in first[1:]] == [1.0 + i for i in range(len(first) - 1)] and {e["dur"] for e in first} == {
        1.0
    }
    by_name = {e["name"]: e for e in first}
    assert by_name["fwd_0"]["cat"] == "forward" and by_name["bwd_0"]["cat"] == "backward"
    assert by_name["pack b0"] | {"ts": 0} == by_name["pack b0"] | {"cat": "pack", "ts": 0}
    assert by_name["wait b0"]["args"] == {"bucket": 0, "bytes": program.buckets[0].num_bytes}
    assert [by_name[name]["cat"] for name in ("reduce_scatter b0", "wait b0", "update b0")] == [
        "launch",
        "wait",
        "update",
    ]
    assert [e["ts"] for e in events if e["name"] == "start"] == [0.0, 40.0] * 2


def test_a_flight_is_from_the_first_launch_to_the_end_of_the_last_wait() -> None:
    program = program_of()
    step = step_of(program, begun_ns=9_000)
    events = trace_events(program, [step])
    ends = [{(c.node.target, c.node.kwargs.get("bucket")): c.end_ns for c in own} for own in step.calls]
    for bucket in (0, 1):
        begin, end = (e for e in events if e["name"] == f"reduce_scatter b{bucket}" and e["ph"] in "be")
        assert begin["ts"] == (min(own[ops.reduce_scatter, bucket] for own in ends) - 9_000) / 1e3
        assert end["ts"] == (max(own[ops.wait, bucket] for own in ends) - 9_000) / 1e3
        assert begin["args"] == {"bucket": bucket, "bytes": program.buckets[bucket].num_bytes, "last_launch_us": 0.5}


def test_one_device_has_no_links() -> None:
    program = program_of(1)
    events = trace_events(program, [step_of(program)])
    check(events)
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["steps", "cpu:0"]


def test_each_message_is_a_flight_of_its_own() -> None:
    passes = default_pipeline(**SMALL_BUCKETS, algorithm=Ring())  # type: ignore[arg-type]
    program = run_passes(handmade(3), [one for one in passes if one.name != "share-parameters"])
    events = trace_events(program, [step_of(program)])
    check(events)
    names = [event["name"] for event in events if event["ph"] == "b"]
    assert len(names) == len({*names}) == len(program.buckets) * 4 * 3 and "send b0 r0 c0 1→2" in names


def test_steps_whose_clocks_overlap_are_cut() -> None:
    program = program_of()
    step = step_of(program)
    check(trace_events(program, [step, step_of(program, step.ended_ns - 3_000)]))


@pytest.mark.slow
@fuzzed(40)
@given(st.integers(1, 3), st.integers(0, 2**32), st.integers(1, 3))
def test_traces_are_always_valid(num_devices: int, seed: int, num_steps: int) -> None:
    program = program_of(num_devices)
    steps: list[RecordedStep] = []
    for number in range(num_steps):
        steps.append(step_of(program, steps[-1].ended_ns + 7 if steps else 12345, seed + number))
    check(trace_events(program, steps))


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    program = program_of()
    target = tmp_path / "some" / "folders" / "trace.json"
    assert write_timeline(str(target), program, [step_of(program)]) == target
    found = json.loads(target.read_text())
    assert found == {"traceEvents": trace_events(program, [step_of(program)]), "displayTimeUnit": "ms"}
    assert list(target.parent.iterdir()) == [target], "nothing is left beside it"


def test_a_file_is_compressed_where_its_name_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, clock = program_of(), itertools.count(10**9, 1000)
    monkeypatch.setattr("time.time", lambda: next(clock))
    target = write_timeline(tmp_path / "trace.json.gz", program, [step_of(program)])
    content = target.read_bytes()
    assert json.loads(gzip.decompress(content))["traceEvents"] == trace_events(program, [step_of(program)])
    assert write_timeline(target, program, [step_of(program)]).read_bytes() == content, "the same bytes each time"


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"Is a directory: '[^']*/folder'$"):
        write_timeline(tmp_path / "folder", program_of(), [step_of(program_of())])
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("broken", ["write_bytes", "replace"])
def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    program = program_of()
    target = tmp_path / "trace.json"
    target.write_text("old")

    def fail(self: Path, *_: Any) -> None:
        self.write_text("half")
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, broken, fail)
    with pytest.raises(OSError, match="no space left"):
        write_timeline(target, program, [step_of(program)])
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
