"""The report on a step's memory."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mirrorc.messages.wording import counted, notebook_html
from mirrorc.printing.printed_values import size_text

_TEXT_WIDTH = 110
_KINDS = ("parameters", "gradients", "optimizer_state", "buffers", "activations", "reserved")


@dataclass(frozen=True)
class LiveValue:
    """A value in memory.

    Attributes:
        name: as in the printed program; inside a region, the operator's name or Inductor's name.
        type: as printed, such as ``f32[64, 2048]``; empty for a value outside of the program.
        num_bytes: of its memory, possibly shared with other values.
    """

    name: str
    type: str
    num_bytes: int


@dataclass(frozen=True)
class ActivationPeak:
    """The peak of a device's activations.

    Attributes:
        num_bytes: bytes of all activations.
        call: the device's running call, such as ``bwd_1`` or ``wait b0``; empty without activations.
        operation: the region's running operator or kernel; empty outside of a region.
        source: the operation's source line or module in the user's code; empty if unknown.
        largest: the largest values in memory, the largest first.
    """

    num_bytes: int
    call: str
    operation: str
    source: str
    largest: tuple[LiveValue, ...]


@dataclass(frozen=True)
class HeldMemory:
    """Bytes by kind in the memory of one device, or in memory that several devices share.

    Attributes:
        devices: names of the devices with this memory.
        parameters: all parameters, trained or not, with the gaps between them.
        gradients: written ranges of buckets, sums that live until the next step, and accumulated gradients.
        optimizer_state: the present state, or the state after the first step; None if unknown before that step.
        buffers: the buffers of the model, and the constants of its graph.
        activations: the peak of values with a lifetime within a step.
        reserved: memory for large values, held until the step is closed, see `mirrorc.passes.ReserveMemory`.
    """

    devices: tuple[str, ...]
    parameters: int
    gradients: int
    optimizer_state: int | None
    buffers: int
    activations: int
    reserved: int = 0

    @property
    def total(self) -> int:
        """The sum of the known kinds."""
        return sum(getattr(self, kind) or 0 for kind in _KINDS)


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device alone.

    Attributes:
        own: without shared memory.
        peak: the moment of ``own.activations``.
        activations_during: their most bytes during each call, by the name of its node in `mirrorc.Step.graphs`.
    """

    device: str
    own: HeldMemory
    peak: ActivationPeak
    activations_during: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryReport:
    """The memory of a step on all devices; `str` of it is a table.

    Totals count shared memory once, and add the peaks of all devices as if they occurred at the same time. The report
    excludes the caller's memory (the batch on CPUs, outputs), unused variables, code, and workspaces of operators.

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
        """Shared memory and each device's own memory, each counted once."""
        return (*self.shared, *(device.own for device in self.devices))

    @property
    def parameters(self) -> int:
        return sum(row.parameters for row in self.rows)

    @property
    def gradients(self) -> int:
        return sum(row.gradients for row in self.rows)

    @property
    def optimizer_state(self) -> int | None:
        """None if unknown before the first step."""
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
    def reserved(self) -> int:
        return sum(row.reserved for row in self.rows)

    @property
    def total(self) -> int:
        """The sum of all known kinds, on all devices."""
        return sum(row.total for row in self.rows)

    def __str__(self) -> str:
        return "\n".join([*self._table(), "", *self._peak_lines(), *self._remark_lines()])

    def _repr_html_(self) -> str:
        devices = counted(len(self.devices), "device")
        return notebook_html(f"A step takes {size_text(self.total)} of memory on {devices}", str(self))

    def _table(self) -> list[str]:
        together = HeldMemory(("all",), *(getattr(self, kind) for kind in _KINDS))
        rows = [*self.rows, *([together] if len(self.rows) > 1 else [])]
        names = [textwrap.shorten(", ".join(row.devices), 40, placeholder=" …") for row in rows]
        names = [f"shared by {name}" if len(row.devices) > 1 else name for name, row in zip(names, rows, strict=True)]
        width = max(map(len, [*names, "device"]))
        kinds = [kind for kind in (*_KINDS, "total") if kind != "reserved" or self.reserved]
        lines = [f"{'device':<{width}}{_cells([kind.replace('_', ' ') for kind in kinds])}"]
        for name, row in zip(names, rows, strict=True):
            lines.append(f"{name:<{width}}{_cells([_size(getattr(row, kind)) for kind in kinds])}")
        return lines

    def _peak_lines(self) -> list[str]:
        names: dict[ActivationPeak, list[str]] = {}
        for device in self.devices:
            names.setdefault(device.peak, []).append(device.device)
        lines = []
        for peak, devices in names.items():
            who = textwrap.shorten(", ".join(devices), 40, placeholder=" …")
            if not peak.call:
                lines.append(f"activations on {who}: none")
                continue
            inside = f", at {peak.operation}" if peak.operation else ""
            lines.append(f"activations on {who} are at their peak, {size_text(peak.num_bytes)}, in {peak.call}{inside}")
            lines += [f"  # {peak.source}"[:_TEXT_WIDTH].rstrip()] if peak.source else []
            lines += [
                f"  {size_text(v.num_bytes):>10}  {v.name}{f': {v.type}' if v.type else ''}" for v in peak.largest
            ]
        return lines

    def _remark_lines(self) -> list[str]:
        return [
            line
            for remark in self.remarks
            for line in textwrap.wrap(f"remark: {remark}", _TEXT_WIDTH, subsequent_indent="  ")
        ]


def _size(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else size_text(num_bytes) if num_bytes else "-"


def _cells(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>16}" for cell in cells)
