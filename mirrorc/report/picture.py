"""The picture of a report: a lane for each device and rows for collectives in flight, on one clock.

Times are percentages of the width, so that the browser can stretch the picture; heights are pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from mirrorc.printing.printed_values import size_text
from mirrorc.report.step_report import Flight, Lane, ReportedCall, StepReport

_AXIS, _LANE, _MEMORY, _ROW, _GAP = 36, 24, 26, 13, 10
_LEAST_WIDTH = 0.06  # of a bar, in percent
_TICKS = 8


@dataclass(frozen=True)
class Bar:
    """A bar of a call or collective. ``line`` is of the program, ``flight`` an index in `StepReport.flights`."""

    x: float
    width: float
    y: int
    height: int
    style: str
    title: str
    text: str = ""
    name: str = ""
    line: int = 0
    flight: int | None = None


@dataclass(frozen=True)
class Label:
    y: int
    height: int
    text: str
    note: str = ""
    bucket: int | None = None


@dataclass(frozen=True)
class Arrow:
    x1: float
    y1: int
    x2: float
    y2: int
    flight: int


@dataclass(frozen=True)
class Curve:
    """``points`` are a polyline in a box of 1000 by 100."""

    y: int
    height: int
    points: str
    title: str


@dataclass
class Picture:
    """``ticks`` have place and text; ``first_bar`` names the first bar of each line."""

    height: int = 0
    ticks: list[tuple[float, str]] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    commit: tuple[float, str] | None = None

    @property
    def first_bar(self) -> dict[int, str]:
        return {bar.line: bar.name for bar in reversed(self.bars) if bar.name and bar.line}


class _Drawing:
    def __init__(self, report: StepReport) -> None:
        self._report, self.picture = report, Picture(_AXIS)
        self._lanes_at: list[int] = []
        calls = [call for lane in report.lanes for call in lane.calls]
        self._most_bytes = max((call.num_bytes or 0 for call in calls), default=0)
        self._line_of = {call.flight: call.line for call in reversed(calls)}  # of a flight's first launch

    def _x(self, ms: float) -> float:
        return round(100 * ms / max(self._report.step_ms, 1e-9), 4)

    def _width(self, start_ms: float, end_ms: float) -> float:
        return max(_LEAST_WIDTH, self._x(end_ms - start_ms))

    def lane(self, replica: int, lane: Lane) -> None:
        picture, y = self.picture, self.picture.height
        note = "" if lane.num_examples is None else f"{lane.num_examples} ex."
        picture.labels.append(Label(y, _LANE, lane.device, note))
        self._lanes_at.append(y)
        if lane.started_ms:
            text = f"start of {lane.device}: {lane.started_ms:.3f} ms"
            picture.bars.append(Bar(0.0, self._width(0, lane.started_ms), y, _LANE, "start", text, "start"))
        for place, call in enumerate(lane.calls):
            picture.bars += self._call(lane, call, f"c{replica}-{place}", y)
        picture.height += _LANE + 2
        if self._most_bytes:
            self._memory(lane)
        picture.height += _GAP

    def _call(self, lane: Lane, call: ReportedCall, name: str, y: int) -> Iterator[Bar]:
        late_end = call.start_ms + call.late_ms
        title = f"{call.name} on {lane.device}: {call.end_ms - call.start_ms:.3f} ms, from {call.start_ms:.3f} ms"
        title += f", of it {call.late_ms:.3f} ms until the last device is there" if call.late_ms else ""
        if call.late_ms:
            width = self._width(call.start_ms, late_end)
            yield Bar(self._x(call.start_ms), width, y, _LANE, "late", title, "", "", call.line, call.flight)
        width = self._width(late_end, call.end_ms)
        style = "moving" if call.part in ("skew", "transfer") else call.part
        yield Bar(self._x(late_end), width, y, _LANE, style, title, call.name, name, call.line, call.flight)

    def _memory(self, lane: Lane) -> None:
        picture, known = self.picture, [call for call in lane.calls if call.num_bytes is not None]
        picture.labels.append(Label(picture.height, _MEMORY, "", "memory"))
        points = [f"{10 * self._x(lane.started_ms):.2f},100"]
        for call in known:
            level = 100 - 96 * (call.num_bytes or 0) / self._most_bytes
            points += [f"{10 * self._x(ms):.2f},{level:.1f}" for ms in (call.start_ms, call.end_ms)]
        points.append(f"{10 * self._x(known[-1].end_ms) if known else 0:.2f},100")
        peak = max(known, key=lambda call: call.num_bytes or 0, default=None)
        title = (
            f"activations and sums on {lane.device}, at most {size_text(peak.num_bytes or 0)} in {peak.name}"
            if peak
            else ""
        )
        picture.curves.append(Curve(picture.height, _MEMORY, " ".join(points), title))
        picture.height += _MEMORY

    def flights(self) -> None:
        by_bucket: dict[int, list[tuple[int, Flight]]] = {}
        for place, flight in enumerate(self._report.flights):
            by_bucket.setdefault(flight.bucket, []).append((place, flight))
        for bucket, flights in by_bucket.items():
            top = self.picture.height
            free: list[float] = []  # when each row of the bucket is free again
            for place, flight in sorted(flights, key=lambda item: item[1].filled_ms):
                row = next((i for i, ms in enumerate(free) if ms <= flight.filled_ms), len(free))
                free[row:] = [flight.finished_ms, *free[row + 1 :]]
                self._flight(place, flight, top + row * _ROW)
            self.picture.labels.append(Label(top, _ROW, f"b{bucket}", bucket=bucket))
            self.picture.height += len(free) * _ROW + 3

    def _flight(self, place: int, flight: Flight, y: int) -> None:
        between = "moving" if flight.moves_by_itself else "idle"
        states = [
            (flight.filled_ms, flight.first_ms, "filling", "is filled"),
            (flight.first_ms, flight.last_ms, "late", "waits for the last launch"),
            (flight.last_ms, flight.waited_ms, between, "moves" if flight.moves_by_itself else "nothing moves"),
            (flight.waited_ms, flight.finished_ms, "moving", "moves"),
        ]
        about = f"{flight.kind} {flight.label} over {flight.link}, {size_text(flight.num_bytes)}"
        line = self._line_of.get(place, 0)
        widest = max(states, key=lambda state: state[1] - state[0])
        for number, (start, end, style, text) in enumerate(states):
            if end > start:
                title = f"{about}: {text} {start:.3f} … {end:.3f} ms"
                name = f"f{place}-{number}"
                label = flight.label if (start, end) == widest[:2] else ""
                x, width = self._x(start), self._width(start, end)
                self.picture.bars.append(Bar(x, width, y, _ROW - 2, style, title, label, name, line, place))
        for arrival in flight.arrivals:
            if arrival.source != arrival.replica:
                tops = self._lanes_at[arrival.source], self._lanes_at[arrival.replica]
                y1, y2 = (tops[0] + _LANE, tops[1]) if tops[0] < tops[1] else (tops[0], tops[1] + _LANE)
                arrow = Arrow(self._x(arrival.launched_ms), y1, self._x(arrival.finished_ms), y2, place)
                self.picture.arrows.append(arrow)

    def finish(self) -> Picture:
        picture, report = self.picture, self._report
        step = _nice(report.step_ms / _TICKS)
        picture.ticks = [(self._x(i * step), f"{i * step:g}") for i in range(int(report.step_ms / step) + 1)]
        if report.commit is not None:
            picture.commit = self._x(report.commit.ms), report.commit.device
        return picture


def _nice(length: float) -> float:
    """Rounds up to 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(max(length, 1e-6)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= length)


def picture_of(report: StepReport) -> Picture:
    drawing = _Drawing(report)
    for replica, lane in enumerate(report.lanes):
        drawing.lane(replica, lane)
    drawing.flights()
    return drawing.finish()
