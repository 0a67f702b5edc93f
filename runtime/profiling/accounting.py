"""Attributes each nanosecond of a device's step to one part, and rounds printed times so that they add up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import is_of, is_region_call, region_of
from mirrorc.ir.operation import Kind
from mirrorc.ir.program import Program
from mirrorc.runtime.profiling.collectives import skews_ns
from mirrorc.runtime.profiling.recorder import RecordedStep

PARTS: Mapping[str, str] = MappingProxyType(
    {
        "start": "until the device's function begins",
        "forward": "in regions of forward",
        "backward": "in regions of backward",
        "pack": "filling buckets",
        "launch": "launching collectives",
        "commit": "in the commit, until the last device has come to it",
        "skew": "in waits, until the last device that is needed has launched",
        "transfer": "the rest of the waits: moving, adding up and multiplying factors",
        "update": "in the optimizer",
        "write": "writing buffers",
        "other": "in other calls",
        "end": "done, while another device is not",
    }
)


def parts_of(program: Program, step: RecordedStep, replica: int) -> dict[str, int]:
    """A device's nanoseconds in each of PARTS. They add up to the duration of the step."""
    skews = skews_ns(step, replica)
    calls = step.calls[replica]
    spent = dict.fromkeys(PARTS, 0)
    spent["start"] = step.started_ns[replica] - step.begun_ns
    spent["end"] = step.ended_ns - (calls[-1].end_ns if calls else step.started_ns[replica])
    for call in calls:
        skew = skews.get(call.node, 0)
        spent["skew"] += skew
        spent[part_of(program, call.node)] += call.duration_ns - skew
    return spent


def part_of(program: Program, node: fx.Node) -> str:
    """A wait counts as ``transfer``; the caller subtracts the skew."""
    if is_region_call(node):
        return program.regions[region_of(node)].phase
    if node.target is ops.commit:
        return "commit"
    if is_of(node, Kind.WAIT):
        return "transfer"
    kinds = (Kind.PACK, Kind.LAUNCH, Kind.UPDATE, Kind.WRITE)
    return next((kind.value for kind in kinds if is_of(node, kind)), "other")


def mean_parts_ms(program: Program, steps: Sequence[RecordedStep], replica: int) -> dict[str, float]:
    parts = [parts_of(program, step, replica) for step in steps]
    return {part: statistics.fmean(step_parts[part] for step_parts in parts) / 1e6 for part in PARTS}


def typical(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """The middle third of the steps by duration. Its means add up; medians would not."""
    order = sorted(range(len(steps)), key=lambda i: steps[i].ended_ns - steps[i].begun_ns)
    num_left_out = len(steps) // 3 if len(steps) > 2 else 0
    return [steps[i] for i in sorted(order[num_left_out : len(steps) - num_left_out])]


def apportioned(values: Sequence[float], num_units: int) -> list[int]:
    """Distributes whole units in proportion to values, by largest remainders. Negative values count as 0."""
    positive = [max(0.0, value) for value in values]
    total = sum(positive)
    if total == 0.0:
        return [0] * len(positive)
    exact = [value / total * num_units for value in positive]
    whole = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: whole[i] - exact[i])
    for i in by_remainder[: num_units - sum(whole)]:
        whole[i] += 1
    return whole


@dataclass(frozen=True)
class Rounding:
    """Milliseconds as whole units of the last printed digit."""

    digits: int

    @classmethod
    def for_step(cls, step_ms: float) -> Rounding:
        return cls(3 if step_ms < 10 else 2 if step_ms < 1000 else 1)

    def text(self, ms: float) -> str:
        return f"{ms:.{self.digits}f}"

    def units(self, ms: float) -> int:
        """Derived from the text, because ``round(ms * scale)`` may round a tie differently."""
        return round(float(self.text(ms)) * 10**self.digits)

    def text_of(self, units: int) -> str:
        return self.text(units / 10**self.digits)

    def adding_up(self, values: Iterable[float], total: float) -> list[str]:
        """Texts whose sum is the text of the total."""
        return [self.text_of(units) for units in apportioned([*values], self.units(total))]
