"""What a printed program says, part by part: what `mirrorc.printing.reader` makes of a text."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_DETAIL = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_COUNTED = re.compile(r"(\d+) (.+)")


@dataclass(frozen=True)
class PrintedValue:
    """A value where it is defined: ``loss: f32[]``, ``d(fc1.weight)``, or ``93 activations``.

    Attributes:
        name: its name; of values that are counted, their kind.
        type: its type as printed; empty where none is.
        count: how many values it stands for.
    """

    name: str
    type: str = ""
    count: int = 1


@dataclass(frozen=True)
class PrintedGradient:
    """A gradient in the bucket table: the variable's name and shape, as ``[4, 2]``."""

    variable: str
    shape: str


@dataclass(frozen=True)
class PrintedBucket:
    """A bucket of the table.

    Attributes:
        number: the line of the text that it is in.
        index: its number in the program.
        dtype: as printed, such as ``f32``.
        size: as printed, such as ``75.1 KiB``.
        num_gradients: how many it has.
        gradients: all of them, in order.
        rule: its update rule's label.
        is_shared: whether one copy of its parameters serves all devices.
        ready_after: the region that gives its last gradient; empty before buckets are packed.
        last_gradient: the variable of that gradient; empty before buckets are packed.
        shares: which device updates which elements, as printed; empty where none updates a share.
    """

    number: int
    index: int
    dtype: str
    size: str
    num_gradients: int
    gradients: tuple[PrintedGradient, ...]
    rule: str
    is_shared: bool = False
    ready_after: str = ""
    last_gradient: str = ""
    shares: str = ""


@dataclass(frozen=True)
class PrintedLine:
    """A line of a function or region: ``device | results = operation(inside)  # comment``.

    Attributes:
        number: its line of the text.
        text: what it says, without device and comment, with single spaces.
        device: a device, or ``all`` where it is one line of all; empty where there is no column of devices. A line of the text
            that several devices have is one of each of them.
        outcome: what is left of ``=``, as printed; empty if there is nothing.
        operation: what is called.
        inside: what is between the call's parentheses, as printed.
        comment: what is said beside it.
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
        """The values that it defines."""
        return tuple(as_value(part) for part in split_list(self.outcome))

    @functools.cached_property
    def arguments(self) -> tuple[str, ...]:
        """What the operation is given, without keywords."""
        return tuple(part for part in split_list(self.inside) if not _DETAIL.fullmatch(part))

    @functools.cached_property
    def details(self) -> Mapping[str, str]:
        """The keywords of the call, such as ``bucket``, ``op`` and ``link``."""
        matches = [_DETAIL.fullmatch(part) for part in split_list(self.inside)]
        return {match[1]: match[2] for match in matches if match}


@dataclass(frozen=True)
class PrintedFunction:
    """A device's program, or that of several.

    Attributes:
        number: its first line of the text.
        name: as printed: ``one_device``, ``all_devices``, ``cpu_0``.
        devices: the devices that run it, in order.
        arguments: what it is given.
        lines: what it does.
        outcome: what it returns, as printed.
        above: the lines above it: who runs it, on which examples, with which loss weight and random stream.
        explanations: what is explained between its lines.
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
    """A region's body.

    Attributes:
        number: its first line of the text.
        name: such as ``fwd_0`` or ``bwd_0.shard1``.
        arguments: what it is given.
        statements: what it does.
        results: the names of what it gives.
    """

    number: int
    name: str
    arguments: tuple[PrintedValue, ...]
    statements: tuple[PrintedLine, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class PrintedProgram:
    """A program, as far as its printed form tells.

    Attributes:
        stage: its stage's name.
        num_devices: as the heading says.
        after: the pass that the heading names; empty if it names none.
        milliseconds: the time that the heading gives, if it does.
        report: what dumps say of a pass, below the heading.
        buckets: the bucket table.
        optimizers: what the optimizer's groups held at compilation, as printed.
        remarks: those of the passes that are kept, each after the name of its pass.
        functions: what the devices run.
        regions: the bodies of regions, by name; none where they were left out.
    """

    stage: str
    num_devices: int
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
        """The names of the devices that run something, in the order of the text."""
        return tuple(dict.fromkeys(device for function in self.functions for device in function.devices))

    @functools.cached_property
    def function_of(self) -> Mapping[str, PrintedFunction]:
        """What each device runs."""
        return {device: function for function in self.functions for device in function.devices}

    def lines_of(self, device: str) -> tuple[PrintedLine, ...]:
        """What a device does, collectives of all devices included."""
        return tuple(line for line in self.function_of[device].lines if line.device in ("", "all", device))


def as_value(text: str) -> PrintedValue:
    """A value where it is defined, from ``NAME: TYPE``, ``NAME`` or ``N KIND``."""
    name, _, kind = text.partition(": ")
    counted = _COUNTED.fullmatch(name)
    return PrintedValue(counted[2], count=int(counted[1])) if counted else PrintedValue(name, kind)


def split_list(text: str) -> tuple[str, ...]:
    """The parts of a list, ``a, (b, c), 'd, e'`` for example; commas in brackets and in quotes do not part."""
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
