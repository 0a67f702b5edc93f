"""The parts of a printed program, which `mirrorc.printing.reader` reads from a text."""

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
    """A value where it is defined: ``loss: f32[]``, ``d(fc1.weight)``, or ``93 activations``.

    Attributes:
        name: its name; for values that are counted, their kind.
        type: its type as printed; empty if none is printed.
        count: the number of values that it stands for.
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
        number: the number of its line in the text.
        index: its number in the program.
        dtype: its dtype as printed, such as ``f32``.
        size: its size as printed, such as ``75.1 KiB``.
        num_gradients: the number of its gradients.
        gradients: its gradients, in order.
        rule: the label of its update rule.
        placement: where its parameters are.
        owner: the device that updates them, or is to update them, if that is left to one; empty if not.
        is_sent_as_factors: whether workers send each other its factors.
        ready_after: the region that gives its last gradient; empty before buckets are packed.
        last_gradient: the variable of that gradient; empty before buckets are packed.
        shares: which device updates which elements, as printed; empty if devices do not update shares.
        packs: which elements are communicated at a time, as printed; empty if buckets are not cut.
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
    """A line of a function or region: ``device | results = operation(inside)  # comment``.

    Attributes:
        number: the number of its line in the text.
        text: its text without device and comment, with single spaces.
        device: its device, or ``all`` for one line of all devices; empty if there is no column of devices. A line of the text
            that lists several devices becomes one line for each of them.
        outcome: the text to the left of ``=``; empty if there is none.
        operation: the name of the called operation.
        inside: the text between the call's parentheses.
        comment: the comment beside it.
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
        """The arguments of the operation, without keywords."""
        return tuple(part for part in split_list(self.inside) if not _DETAIL.fullmatch(part))

    @functools.cached_property
    def details(self) -> Mapping[str, str]:
        """The keywords of the call, such as ``bucket``, ``op`` and ``link``."""
        matches = [_DETAIL.fullmatch(part) for part in split_list(self.inside)]
        return {match[1]: match[2] for match in matches if match}


@dataclass(frozen=True)
class PrintedFunction:
    """The program of one or several devices.

    Attributes:
        number: the number of its first line in the text.
        name: its name as printed: ``one_device``, ``all_devices``, ``cpu_0``.
        devices: the devices that run it, in order.
        arguments: its arguments.
        lines: the lines of its body.
        outcome: the returned values, as printed.
        above: the lines above it, which say which devices run it, on which examples, with which loss weight and random stream.
        explanations: the explanations between its lines.
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
        number: the number of its first line in the text.
        name: its name, such as ``fwd_0`` or ``bwd_0.shard1``.
        arguments: its arguments.
        statements: the lines of its body.
        results: the names of its results.
    """

    number: int
    name: str
    arguments: tuple[PrintedValue, ...]
    statements: tuple[PrintedLine, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class PrintedProgram:
    """The information about a program that its printed form contains.

    Attributes:
        stage: the name of its stage.
        num_devices: the number of devices in the heading.
        is_evaluation: whether it is an evaluation, which has no buckets.
        accumulation: what the heading says of the gradients of several calls: "accumulating", "after accumulation" or nothing.
        worker: which of several workers the heading names, and its replicas; empty if it names none.
        workers: what it says of all workers, below the heading.
        after: the pass that the heading names; empty if it names none.
        milliseconds: the time in the heading, if there is one.
        report: a dump's report on the pass, below the heading.
        buckets: the bucket table.
        optimizers: the hyperparameters of the optimizer's groups at compilation, as printed.
        remarks: the kept remarks of passes, each after the name of its pass.
        functions: the functions that the devices run.
        regions: the bodies of regions, by name; empty if they were left out.
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
        """The names of the devices that run something, in the order of the text."""
        return tuple(dict.fromkeys(device for function in self.functions for device in function.devices))

    @functools.cached_property
    def function_of(self) -> Mapping[str, PrintedFunction]:
        """The function that each device runs."""
        return {device: function for function in self.functions for device in function.devices}

    def lines_of(self, device: str) -> tuple[PrintedLine, ...]:
        """The lines of a device, including the collectives of all devices."""
        return tuple(line for line in self.function_of[device].lines if line.device in ("", "all", device))


def as_value(text: str) -> PrintedValue:
    """Reads a defined value from ``NAME: TYPE``, ``NAME`` or ``N KIND``."""
    name, _, kind = text.partition(": ")
    counted = _COUNTED.fullmatch(name)
    return PrintedValue(counted[2], count=int(counted[1])) if counted else PrintedValue(name, kind)


def split_list(text: str) -> tuple[str, ...]:
    """Splits a list such as ``a, (b, c), 'd, e'`` at its commas, except for commas in brackets and in quotes."""
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
