"""The parts of a printed program, as read by `mirrorc.printing.reader`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mirrorc.ir.variables import Placement

_DETAIL = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_COUNTED = re.compile(r"(\d+) (.+)")


@dataclass(frozen=True)
class PrintedValue:
    """A printed value, ``loss: f32[]`` or ``d(fc1.weight)``; or several of one kind, ``93 activations``."""

    name: str
    type: str = ""
    count: int = 1


@dataclass(frozen=True)
class PrintedGradient:
    variable: str
    shape: str


@dataclass(frozen=True)
class PrintedBucket:
    """A bucket of the table.

    Attributes:
        number: the line's number in the text.
        owner: the device that updates the bucket, now or after a later pass; or empty.
        ready_after: the region of the bucket's last gradient; empty before buckets are packed.
        shares: the printed elements that each device updates.
        packs: the printed elements of each pack.
    """

    number: int
    index: int
    dtype: str
    size: str
    num_gradients: int
    gradients: tuple[PrintedGradient, ...]
    rule: str
    placement: Placement
    is_sent_as_factors: bool
    ready_after: str = ""
    last_gradient: str = ""
    shares: str = ""
    owner: str = ""
    packs: str = ""


@dataclass(frozen=True)
class PrintedLine:
    """A line of a function or region: ``device | outcome = operation(inside)  # comment``.

    Attributes:
        number: the line's number in the text.
        text: ``outcome = operation(inside)``, without padding.
        device: a device or ``all``; empty without a device column. A printed line of several devices is read once for each.
    """

    number: int
    text: str
    device: str
    outcome: str
    operation: str
    inside: str
    comment: str = ""

    @functools.cached_property
    def results(self) -> tuple[PrintedValue, ...]:
        return tuple(as_value(part) for part in split_list(self.outcome))

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        return tuple(part for part in split_list(self.inside) if not _DETAIL.fullmatch(part))

    @functools.cached_property
    def details(self) -> Mapping[str, str]:
        """Keyword arguments, such as ``bucket``, ``op`` and ``link``."""
        matches = [_DETAIL.fullmatch(part) for part in split_list(self.inside)]
        return {match[1]: match[2] for match in matches if match}


@dataclass(frozen=True)
class PrintedFunction:
    """The program of one or several devices.

    Attributes:
        number: the number of the first line in the text.
        name: such as ``all_devices`` or ``cpu_0``.
        above: lines on devices and examples.
    """

    number: int
    name: str
    devices: tuple[str, ...]
    arguments: tuple[PrintedValue, ...]
    lines: tuple[PrintedLine, ...]
    outcome: str
    above: tuple[str, ...] = ()
    explanations: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrintedRegion:
    """``number`` is the number of the first line in the text."""

    number: int
    name: str
    arguments: tuple[PrintedValue, ...]
    statements: tuple[PrintedLine, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class PrintedProgram:
    """A program, as far as its printed form describes it.

    Attributes:
        accumulation: "accumulating", "after accumulation", or empty.
        worker: the worker and its replicas; empty without other workers.
        report: a dump's report on the pass.
    """

    stage: str
    num_devices: int
    is_evaluation: bool = False
    accumulation: str = ""
    worker: str = ""
    workers: str = ""
    after: str = ""
    milliseconds: float | None = None
    report: tuple[str, ...] = ()
    buckets: tuple[PrintedBucket, ...] = ()
    optimizers: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    functions: tuple[PrintedFunction, ...] = ()
    regions: Mapping[str, PrintedRegion] = field(default_factory=dict)

    @functools.cached_property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device for function in self.functions for device in function.devices))

    @functools.cached_property
    def function_of(self) -> Mapping[str, PrintedFunction]:
        return {device: function for function in self.functions for device in function.devices}

    def lines_of(self, device: str) -> tuple[PrintedLine, ...]:
        """Includes collectives of all devices."""
        return tuple(line for line in self.function_of[device].lines if line.device in ("", "all", device))


def as_value(text: str) -> PrintedValue:
    """Reads ``NAME: TYPE``, ``NAME`` or ``N KIND``."""
    name, _, kind = text.partition(": ")
    counted = _COUNTED.fullmatch(name)
    return PrintedValue(counted[2], count=int(counted[1])) if counted else PrintedValue(name, kind)


def split_list(text: str) -> tuple[str, ...]:
    """Splits ``a, (b, c), 'd, e'`` at its commas outside of brackets and quotes."""
    return tuple(part.strip() for part in _parts(text)) if text.strip() else ()


def _parts(text: str) -> Iterator[str]:
    depth, start, quote = 0, 0, ""
    i = 0
    while i < len(text):
        char = text[i]
        if quote:
            i += char == "\\"
            quote = "" if char == quote else quote
        elif char in "'\"" and (i == 0 or text[i - 1] in " =[(,{"):
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:i]
            start = i + 1
        i += 1
    yield text[start:]
