"""Compares the replicas' variables and optimizer state, to detect memory corruption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mirrorc.errors import ExecutionError
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Synchronization, Variable
from mirrorc.messages.problem import message
from mirrorc.messages.wording import counted, listed
from mirrorc.runtime.state.shared.shared_state import Hold
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.state.variables.layout import slot_views

_ROW = 1024  # words in a sum


@dataclass(frozen=True)
class Copies:
    """The replicas' copies of one variable, bucket or state entry.

    Attributes:
        entry: name of a variable or state entry; empty for parameters in a bucket.
    """

    entry: str
    tensors: Sequence[torch.Tensor]
    bucket: Bucket | None = None

    @property
    def are_many(self) -> bool:
        return len({(tensor.device, tensor.data_ptr()) for tensor in self.tensors}) > 1

    def of_variables(self) -> Iterator[tuple[str, str, list[torch.Tensor]]]:
        if self.bucket is None:
            yield self.entry, "", list(self.tensors)
            return
        is_scalar = self.tensors[0].numel() != self.bucket.num_elements
        views = [[t] * len(self.bucket.slots) if is_scalar else slot_views(t, self.bucket) for t in self.tensors]
        for i, slot in enumerate(self.bucket.slots):
            yield slot.variable, self.entry, [view[i] for view in views]


class ComparedState(StepState):
    def __init__(self, hold: Hold, every: int) -> None:
        super().__init__(hold)
        self._every = every
        self._num_begun = 0
        self._unwritten: list[Variable] = []  # by the present program
        self._plan: Sequence[Bucket] = ()  # of the present program

    def prepare_for(self, program: Program, *, is_stale: bool | None = None) -> None:
        super().prepare_for(program, is_stale=is_stale)
        self._plan = program.buckets
        self._unwritten = [
            variable
            for name, variable in program.variables.items()
            if variable.synchronization is Synchronization.MIRRORED
            and not variable.update
            and name in self.store.tensors
        ]

    def begin(self) -> None:
        if (self._num_begun + 1) % self._every == 0:
            self._compare()
        super().begin()
        self._num_begun += 1

    def _compare(self) -> None:
        copies = [copy for copy in self._all_copies() if copy.are_many]
        if not copies:
            return
        first, *others = [checksums([copy.tensors[r] for copy in copies]) for r in range(len(self.store.devices))]
        if any(not torch.equal(first, other) for other in others):
            self._refuse(copies)

    def _all_copies(self) -> Iterator[Copies]:
        for flat in self.store.buckets:
            yield Copies("", flat.parameters, self._plan[flat.bucket.index])
        yield from (Copies(variable.name, self.store.read_by(variable)) for variable in self._unwritten)
        for bucket, key, tensors in self.optimizers.copies():
            yield Copies(key, tensors, self._plan[bucket.index])

    def _refuse(self, copies: Sequence[Copies]) -> None:
        """Differences only in gaps between variables are no error."""
        place = {name: i for i, name in enumerate(self.store.tensors)}
        entries = [item for copy in copies for item in copy.of_variables()]
        for name, entry, tensors in sorted(entries, key=lambda item: place[item[0]]):
            bits = [_bytes(tensor).cpu() for tensor in tensors]
            groups: list[list[int]] = []
            for replica, copy in enumerate(bits):
                alike = next((group for group in groups if torch.equal(bits[group[0]], copy)), None)
                groups.append([replica]) if alike is None else alike.append(replica)
            if len(groups) > 1:
                raise ExecutionError(self._report(f"{entry} of {name!r}" if entry else repr(name), groups, bits))

    def _report(self, subject: str, groups: Sequence[Sequence[int]], bits: Sequence[torch.Tensor]) -> str:
        devices, most = self.store.devices, max(groups, key=len)
        has_majority = sum(len(group) == len(most) for group in groups) == 1
        differing = [replica for group in groups if group is not most for replica in group]
        number = int((bits[differing[0]] != bits[most[0]]).sum())
        who = f"{listed(devices[r] for r in differing)} {'differs' if len(differing) == 1 else 'differ'} from "
        who += f"{listed(devices[r] for r in most)}{'' if has_majority else ', and none has a majority'}"
        return message(
            f"MC5011: the replicas' copies of {subject} are not equal any more",
            f"{who} ({counted(number, 'byte')}); memory has gone bad, or something has written to one copy alone",
            "load a checkpoint of model and optimizer, which writes all copies anew",
            now="No parameter was changed",
        )


def make_state(hold: Hold, every: int) -> StepState:
    return ComparedState(hold, every) if every else StepState(hold)


def checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One row per tensor, in CPU memory, with one transfer per device."""
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    sums = torch.empty(len(tensors), 4, dtype=torch.int64)
    for places in by_device.values():
        sums[places] = torch.stack([checksum(tensors[i]) for i in places]).cpu()
    return sums


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """1-D, aligned for views as int64."""
    flat = tensor.detach().reshape(-1)
    flat = flat.clone() if flat.storage_offset() * flat.element_size() % 8 else flat
    return flat.view(torch.uint8)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A checksum of a tensor's bits: four integers. It detects one or two changed bits, and almost surely more.

    The int64 words form a matrix; its row sums and column sums are added with weights.
    """
    raw = _bytes(tensor)
    num_words = raw.numel() // 8
    words, tail = raw[: num_words * 8].view(torch.int64), raw[num_words * 8 :].long()
    num_rows = num_words // _ROW
    body, rest = words[: num_rows * _ROW].view(num_rows, _ROW), words[num_rows * _ROW :]
    rows, columns = torch.cat([body.sum(1), rest.sum().reshape(1)]), body.sum(0)
    columns[: rest.numel()] += rest
    return torch.cat([_weighted(rows), _weighted(torch.cat([columns, tail]))])


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    """Sums upper and lower halves separately, so that weights do not shift the highest bit out."""
    halves = torch.stack([sums >> 32, sums & 0xFFFFFFFF])
    return (halves * torch.arange(1, sums.numel() + 1, device=sums.device)).sum(1)
