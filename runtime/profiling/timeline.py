"""Traces of recorded steps for Perfetto and Chrome."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from mirrorc.ir.nodes import bucket_of, call_name, is_region_call, region_of
from mirrorc.ir.operation import Kind, operation_of
from mirrorc.ir.program import Program
from mirrorc.messages.source_lines import source_line
from mirrorc.runtime.profiling.collectives import Collective, collectives_of
from mirrorc.runtime.profiling.recorder import RecordedStep
from mirrorc.serialization.program_file import write_whole

_PROCESS = 1
_STEPS = 1  # the track of the steps; those of devices and links follow
_CATEGORIES = {kind: kind.value for kind in (Kind.PACK, Kind.LAUNCH, Kind.WAIT, Kind.UPDATE)} | {Kind.WRITE: "update"}
Event = dict[str, Any]


def write_timeline(path: str | os.PathLike[str], program: Program, steps: Sequence[RecordedStep]) -> Path:
    text = json.dumps({"traceEvents": trace_events(program, steps), "displayTimeUnit": "ms"})
    return write_whole(path, text.encode())


def trace_events(program: Program, steps: Sequence[RecordedStep]) -> list[Event]:
    """Events of a trace, in microseconds from the beginning of the first step.

    The steps, each device and each link have a track. Only slices of links may overlap: if GPU clocks disagree, a slice
    begins at the end of its predecessor.
    """
    collectives = collectives_of(steps[0])
    links = list(dict.fromkeys(collective.link for collective in collectives))
    tracks = ["steps", *(device.name for device in program.devices), *links]
    events = _metadata(tracks)
    whole: list[Span] = [(f"step {i}", s.begun_ns, s.ended_ns, {"cat": "step"}) for i, s in enumerate(steps)]
    events += _disjoint(whole, _STEPS, steps[0].begun_ns)
    details = functools.cache(functools.partial(_details, program))
    for replica in range(program.num_replicas):
        spans = [span for step in steps for span in _device_spans(step, replica, details)]
        events += _disjoint(spans, _STEPS + 1 + replica, steps[0].begun_ns)
    for collective in collectives:
        track = _STEPS + 1 + program.num_replicas + links.index(collective.link)
        for number, step in enumerate(steps):
            for event in _flight(program, step, collective, steps[0].begun_ns):
                events.append(
                    event | {"pid": _PROCESS, "tid": track, "id": f"{event['name']} {collective.link} {number}"}
                )
    return events


Span = tuple[str, int, int, Mapping[str, Any]]  # name, start and end in nanoseconds, further fields


def _metadata(tracks: Sequence[str]) -> list[Event]:
    events: list[Event] = [{"ph": "M", "pid": _PROCESS, "tid": 0, "name": "process_name", "args": {"name": "mirrorc"}}]
    for track, name in enumerate(tracks, _STEPS):
        for key, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": track})):
            events.append({"ph": "M", "pid": _PROCESS, "tid": track, "name": key, "args": value})
    return events


def _disjoint(spans: Iterable[Span], track: int, origin_ns: int) -> Iterator[Event]:
    before_ns = origin_ns
    for name, start_ns, end_ns, fields in spans:
        start_ns = max(start_ns, before_ns)
        before_ns = max(start_ns, end_ns)
        where = {"ph": "X", "pid": _PROCESS, "tid": track, "name": name}
        yield where | {"ts": (start_ns - origin_ns) / 1e3, "dur": (before_ns - start_ns) / 1e3} | dict(fields)


def _device_spans(step: RecordedStep, replica: int, details: Any) -> Iterator[Span]:
    yield "start", step.begun_ns, step.started_ns[replica], {"cat": "start"}
    for call in step.calls[replica]:
        yield call_name(call.node), call.start_ns, call.end_ns, details(call.node)


def category_of(node: fx.Node) -> str:
    if is_region_call(node):
        return "region"
    operation = operation_of(node.target)
    return _CATEGORIES.get(operation.kind, "other") if operation is not None else "other"


def _details(program: Program, node: fx.Node) -> dict[str, Any]:
    category = category_of(node)
    if is_region_call(node) and region_of(node) in program.regions:
        category = program.regions[region_of(node)].phase
    arguments: dict[str, Any] = {}
    if "bucket" in node.kwargs:
        bucket = bucket_of(node)
        arguments |= {"bucket": bucket, "bytes": program.buckets[bucket].num_bytes}
    if line := source_line(node):
        arguments["source"] = line
    return {"cat": category, "args": arguments}


def _flight(program: Program, step: RecordedStep, collective: Collective, origin_ns: int) -> Iterator[Event]:
    launches = [step.call_of[launch.node].end_ns for launch in collective.launches]
    waits = [step.call_of[launch.wait].end_ns for launch in collective.launches if launch.wait is not None]
    properties = {"cat": collective.link, "name": f"{collective.kind} {collective.label}"}
    arguments = {
        "bucket": collective.bucket,
        "bytes": program.buckets[collective.bucket].num_bytes,
        "last_launch_us": (max(launches) - min(launches)) / 1e3,
    }
    yield properties | {"ph": "b", "ts": (min(launches) - origin_ns) / 1e3, "args": arguments}
    yield properties | {"ph": "e", "ts": (max([*launches, *waits]) - origin_ns) / 1e3}
