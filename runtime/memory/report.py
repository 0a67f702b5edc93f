"""The report on a step's memory."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from mirrorc.messages.wording import counted, notebook_html
from mirrorc.printing.printed_values import size_text, spans

_TEXT_WIDTH = 110
_NO_BREAK = "\N{NO-BREAK SPACE}"
_KINDS = ("parameters", "gradients", "optimizer_state", "buffers", "activations", "passing_sums", "reserved")
_RARE = ("passing_sums", "reserved")  # columns that are left out where nothing is in them
_PASSING = (
    "passing sums: by how much the peak with sums, messages and temporaries of updates exceeds that of activations"
)


@dataclass(frozen=True)
class LiveValue:
    """A value in memory.

    Attributes:
        name: as in the printed program; inside a region, the operator's name or Inductor's name.
        type: as printed, such as ``f32[64, 2048]``; empty if the value is not in the program.
        num_bytes: of its memory, possibly shared with other values.
    """

    name: str
    type: str
    num_bytes: int


@dataclass(frozen=True)
class MemoryPeak:
    """The peak of a device's temporary memory in a step.

    Attributes:
        num_bytes: bytes of all values.
        call: the device's running call, such as ``bwd_1`` or ``wait b0``; empty without values.
        operation: the region's running operator or kernel; empty outside of a region.
        source: the operation's source line or module in the user's code; empty if unknown.
        largest: the largest values, in descending order.
        num_smaller: the number of other values.
    """

    num_bytes: int
    call: str
    operation: str
    source: str
    largest: tuple[LiveValue, ...]
    num_smaller: int = 0

    @property
    def smaller_bytes(self) -> int:
        return self.num_bytes - sum(value.num_bytes for value in self.largest)


GRADIENT_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "buckets": "in buckets",
        "accumulated": "accumulated over calls",
        "users": "in p.grad of the model",
        "users_buckets": "in buckets of step.gradients()",
        "unsent": "not yet sent, present and new",
        "kept": "in sums outside of buckets, kept until the next step",
    }
)


@dataclass(frozen=True)
class HeldMemory:
    """Bytes by kind in the memory of one device, or in memory that several devices share.

    Attributes:
        devices: names of the devices with this memory.
        parameters: all parameters, trained or not, with the gaps between them.
        gradients: between steps; the sum of ``gradient_parts``.
        optimizer_state: the present state, or the state after the first step; None if unknown before that step.
        buffers: the buffers of the model, and the constants of its graph.
        activations: the peak of temporary memory of forward and backward.
        reserved: memory for large values, held until the step is closed, see `mirrorc.passes.ReserveMemory`.
        passing_sums: the peak of all temporary memory, with sums, messages and temporaries of updates, minus
            ``activations``.
        gradient_parts: bytes by part, see ``GRADIENT_PARTS``: the written ranges of buckets; gradients accumulated over
            calls, or in ``p.grad``; memory of `mirrorc.Step.gradients`; residuals of compression; sums that links or
            updates keep until the next step.
    """

    devices: tuple[str, ...]
    parameters: int
    gradients: int
    optimizer_state: int | None
    buffers: int
    activations: int
    reserved: int = 0
    passing_sums: int = 0
    gradient_parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def within_step(self) -> int:
        """The peak of all temporary memory."""
        return self.activations + self.passing_sums

    @property
    def total(self) -> int:
        """The sum of the known kinds."""
        return sum(getattr(self, kind) or 0 for kind in _KINDS)


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device alone.

    Attributes:
        own: memory that is not shared.
        peak: the peak of ``own.within_step``.
        activation_peak: the peak of ``own.activations``.
        within_calls: peak bytes of temporary memory during each call, by the name of its node in `mirrorc.Step.graphs`.
    """

    device: str
    own: HeldMemory
    peak: MemoryPeak
    activation_peak: MemoryPeak
    within_calls: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryReport:
    """The memory of a step on all devices; its `str` is a table.

    Totals count shared memory once, and add the peaks of all devices. The report excludes the caller's memory (the
    batch on CPUs, outputs), unused variables, code, and workspaces of operators.

    Attributes:
        devices: in order of replicas.
        shared: memory of several devices. On CPUs, this includes parameters and optimizer state.
        remarks: unknown or estimated figures, with reasons.
    """

    devices: tuple[DeviceMemory, ...]
    shared: tuple[HeldMemory, ...]
    remarks: tuple[str, ...]

    @property
    def rows(self) -> tuple[HeldMemory, ...]:
        """Shared memory and each device's own memory, each once."""
        return (*self.shared, *(device.own for device in self.devices))

    @property
    def parameters(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def gradients(self) -> int:
        return sum(row.gradients for row in self.rows)

    @property
    def optimizer_state(self) -> int | None:
        """Bytes of optimizer state; None if unknown before the first step."""
        parts = [row.optimizer_state for row in self.rows]
        return None if None in parts else sum(part for part in parts if part is not None)

    @property
    def buffers(self) -> int:
        return sum(row.buffers for row in self.rows)

    @property
    def activations(self) -> int:
        """The sum of the devices' peaks."""
        return sum(row.activations for row in self.rows)

    @property
    def passing_sums(self) -> int:
        return sum(row.passing_sums for row in self.rows)

    @property
    def within_step(self) -> int:
        """The sum of the devices' peaks of all temporary memory."""
        return sum(row.within_step for row in self.rows)

    @property
    def reserved(self) -> int:
        return sum(row.reserved for row in self.rows)

    @property
    def total(self) -> int:
        """The sum of all known kinds, on all devices."""
        return sum(row.total for row in self.rows)

    def gradient_texts(self) -> Iterator[str]:
        """The parts of gradients on each device, unless all are in buckets."""
        devices: dict[tuple[tuple[str, int], ...], list[str]] = {}
        for row in self.rows:
            parts = ((part, row.gradient_parts.get(part, 0)) for part in GRADIENT_PARTS)
            devices.setdefault(tuple((part, size) for part, size in parts if size), []).extend(row.devices)
        for sizes, names in devices.items():
            if any(part != "buckets" for part, _ in sizes):
                texts = [f"{size_text(size).replace(' ', _NO_BREAK)} {GRADIENT_PARTS[part]}" for part, size in sizes]
                yield f"gradients on {_shortened(names)}: {', '.join(texts)}"

    def __str__(self) -> str:
        lines = [*self._table(), *self._gradient_lines(), "", *self._peak_lines(), *self._remark_lines()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        devices = counted(len(self.devices), "device")
        return notebook_html(f"A step takes {size_text(self.total)} of memory on {devices}", str(self))

    def _table(self) -> list[str]:
        together = HeldMemory(("all",), **{kind: getattr(self, kind) for kind in _KINDS})
        rows = [*self.rows, *([together] if len(self.rows) > 1 else [])]
        names = [_shortened(row.devices) for row in rows]
        names = [f"shared by {name}" if len(row.devices) > 1 else name for name, row in zip(names, rows, strict=True)]
        width = max(map(len, [*names, "device"]))
        kinds = [kind for kind in (*_KINDS, "total") if kind not in _RARE or getattr(self, kind)]
        lines = [f"{'device':<{width}}{_cells([kind.replace('_', ' ') for kind in kinds])}"]
        for name, row in zip(names, rows, strict=True):
            lines.append(f"{name:<{width}}{_cells([_size(getattr(row, kind)) for kind in kinds])}")
        return lines

    def _gradient_lines(self) -> list[str]:
        sentences = [*self.gradient_texts(), *([_PASSING] if self.passing_sums else [])]
        texts = [textwrap.wrap(text, _TEXT_WIDTH, subsequent_indent="  ") for text in sentences]
        return ["", *(line.replace(_NO_BREAK, " ") for lines in texts for line in lines)] if texts else []

    def _peak_lines(self) -> list[str]:
        devices: dict[tuple[MemoryPeak, MemoryPeak], list[str]] = {}
        for device in self.devices:
            devices.setdefault((device.activation_peak, device.peak), []).append(device.device)
        lines = []
        for (of_activations, peak), names in devices.items():
            who = _shortened(names)
            is_at_once = (peak.call, peak.operation) == (of_activations.call, of_activations.operation)
            if of_activations == peak or not is_at_once:
                lines += _moment(f"activations on {who}", of_activations)
            if of_activations != peak:
                lines += _moment(f"activations and passing sums on {who}", peak)
        return lines

    def _remark_lines(self) -> list[str]:
        return [
            line
            for remark in self.remarks
            for line in textwrap.wrap(f"remark: {remark}", _TEXT_WIDTH, subsequent_indent="  ")
        ]


def _moment(of_whom: str, peak: MemoryPeak) -> list[str]:
    if not peak.call:
        return [f"{of_whom}: none"]
    inside = f", at {peak.operation}" if peak.operation else ""
    lines = [f"{of_whom} are at their peak, {size_text(peak.num_bytes)}, in {peak.call}{inside}"]
    lines += [f"  # {peak.source}"[:_TEXT_WIDTH].rstrip()] if peak.source else []
    lines += [f"  {size_text(v.num_bytes):>10}  {v.name}{f': {v.type}' if v.type else ''}" for v in peak.largest]
    if peak.num_smaller:
        lines.append(f"  {size_text(peak.smaller_bytes):>10}  {counted(peak.num_smaller, 'smaller value')}")
    return lines


def _shortened(names: Sequence[str]) -> str:
    return textwrap.shorten(spans(names), 40, placeholder=" …")


def _size(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else size_text(num_bytes) if num_bytes else "-"


def _cells(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>16}" for cell in cells)
