"""Turns a device's printed program into events, with keys by which an event is found in another program."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mirrorc.ir.operation import Kind, operation_named
from mirrorc.printing.printed_program import PrintedLine, PrintedProgram

PACK, WAIT, WRITE, FACTORED = (kind.value for kind in (Kind.PACK, Kind.WAIT, Kind.WRITE, Kind.FACTORED))

_VARIANT = re.compile(r"\.shard\d+$")  # of a region for another shape of a shard

Key = tuple[str, str, int]
"""Identifies an event in any program: its kind; its bucket, region or gradient; its number among equal events of its device."""


@dataclass(frozen=True)
class Event:
    """A line of a device's program.

    Attributes:
        key: what it is. Kinds are ``launch`` (of a collective), ``wait``, ``update``, ``pack``, ``factored`` (a gradient as two
            factors), ``write``, ``region`` (a call of one) and ``operator`` (of torch).
        line: as printed.
    """

    key: Key
    line: PrintedLine

    @property
    def subject(self) -> str:
        """Its bucket, region or gradient."""
        return self.key[1]


@dataclass(frozen=True)
class Schedule:
    """What a device does, in order."""

    events: tuple[Event, ...]

    def of(self, *kinds: str) -> list[Event]:
        """The events of some kinds."""
        return [event for event in self.events if event.key[0] in kinds]


def schedule_of(program: PrintedProgram, device: str, name_of: Callable[[str], str]) -> Schedule:
    """The schedule of a device; ``name_of`` gives the name of a bucket in the keys."""
    counts: Counter[tuple[str, str]] = Counter()
    events = []
    for line in program.lines_of(device):
        kind = _kind(line.operation)
        bucket = line.details.get("bucket")
        subject = name_of(bucket) if bucket is not None and kind != "operator" else line.operation
        if kind == FACTORED:
            subject = line.results[0].name if line.results else ""
        counts[kind, subject] += 1
        events.append(Event((kind, subject, counts[kind, subject]), line))
    return Schedule(tuple(events))


def _kind(operation: str) -> str:
    found = operation_named(operation)
    if found is not None:
        return found.kind.value
    is_operator = "." in _VARIANT.sub("", operation) or operation == "getitem"
    return (Kind.COMPUTE if is_operator else Kind.REGION).value
