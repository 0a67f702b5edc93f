"""Estimates a step's memory from graphs, bucket plan and optimizer state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mirrorc.analysis.gradients.factored_gradients import left_to_shares, pack_of_gradients, slots_left_as_factors
from mirrorc.analysis.gradients.sent_factors import factors_of_shares
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import bucket_of, call_name, calls_to
from mirrorc.ir.program import Accumulation, Program
from mirrorc.ir.variables import Role, Synchronization, Variable
from mirrorc.messages.source_lines import source_line
from mirrorc.runtime.codegen.regions import RegionFunction
from mirrorc.runtime.memory.activations import Walk
from mirrorc.runtime.memory.dry_run import DryRun, dry_run
from mirrorc.runtime.memory.ledger import Ledger, Peak
from mirrorc.runtime.memory.report import GRADIENT_PARTS, DeviceMemory, HeldMemory, LiveValue, MemoryPeak, MemoryReport
from mirrorc.runtime.state.optimizers.flat_optimizer import UpdateMemory
from mirrorc.runtime.state.shares.pieces import pieces_of_share
from mirrorc.runtime.state.step_state import StepState

_MOST_LISTED = 5  # values at the peak
_LEAST_LISTED = 0.01  # of the peak
_CHOOSING = "choose-checkpoints"  # its remark explains a smaller peak

Owners = tuple[str, ...]


def report_memory(program: Program, regions: Sequence[Mapping[str, RegionFunction]], state: StepState) -> MemoryReport:
    """The memory of a step of a LOWERED program, before or after its first run."""
    tally = _Tally(program)
    for variable in program.variables.values():
        tally.add_variable(variable)
    updates = {b.index: state.update_memory(b) for b in program.buckets if b.rule.elementwise}
    for bucket in program.buckets:
        tally.add_bucket(bucket)
        if bucket.index in updates:
            tally.add_state(bucket, updates[bucket.index])
    alone: dict[int, list[Bucket]] = {}  # by optimizer
    for bucket in program.buckets if program.has_parameters_in_buckets else ():
        if not bucket.rule.elementwise:
            alone.setdefault(id(state.optimizers.groups[bucket.rule.group][0]), []).append(bucket)
    for buckets in alone.values():
        tally.add_user_state(buckets, state.user_state_bytes(buckets))
    dry_runs = _dry_runs(program, regions)
    temporaries = {index: update.temporary_bytes for index, update in updates.items()}
    walks = [Walk(program, replica, dry_runs, temporaries).run() for replica in range(program.num_replicas)]
    for device, walk in zip(program.devices, walks, strict=True):
        tally.bytes[device.name,] += Counter(
            kept=walk.kept,
            activations=walk.activation_peak.num_bytes,
            passing_sums=walk.peak.num_bytes - walk.activation_peak.num_bytes,
        )
    tally.add_reserved()
    if program.has_parameters_in_buckets:
        tally.add_users_gradients(state)
    tally.remarks += [run.remark for run in dry_runs.values() if run.remark]
    tally.remarks += [remark.text for remark in program.remarks if remark.by == _CHOOSING]
    tally.remarks += _remarks_on_call(program, state)
    return tally.report(walks)


def _remarks_on_call(program: Program, state: StepState) -> list[str]:
    if program.takes_tangents or program.accumulation is Accumulation.FORWARD:
        way = "backward" if program.takes_tangents else "forward"
        return [
            f"this is {way} of a module: activations that forward keeps count in forward and in backward; earlier gradients "
            "and the optimizer's state are the caller's, and are not counted"
        ]
    calls = "an evaluation" if not program.trains else "a call for gradients beside a step"
    if program.trains and not (program.leaves_gradients and state.buckets):
        return []
    return [
        f"this is {calls}: gradients, optimizer state and copies of parameters that training has laid out stay where "
        "they are, and are not counted; after a training step, or prepare(), this is the memory of training"
    ]


def _dry_runs(program: Program, regions: Sequence[Mapping[str, RegionFunction]]) -> dict[str, DryRun]:
    runs: dict[str, DryRun] = {}
    for device, functions in zip(program.devices, regions, strict=True):
        for name, function in functions.items():
            if name not in runs:
                runs[name] = dry_run(program.regions[name], function, device.torch_device)
    return runs


class _Tally:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.names = tuple(device.name for device in program.devices)
        self.bytes: dict[Owners, Counter[str]] = {(name,): Counter() for name in self.names}
        self.unknown: set[Owners] = set()  # with unknown optimizer state
        self.remarks: list[str] = []
        self._parts = [0] * len(self.names)  # bytes of memory for parts of gradients, by device
        self._sent_in_part = list(calls_to(program.graphs()[0], *ops.EXCHANGES_OF_PARTS))
        self._in_buckets = {slot.variable for bucket in program.buckets for slot in bucket.slots}

    def _add(self, owners: Owners, kind: str, num_bytes: int) -> None:
        self.bytes.setdefault(owners, Counter())[kind] += num_bytes

    def add_variable(self, variable: Variable) -> None:
        if variable.name in self._in_buckets:
            return
        num_bytes = math.prod(variable.shape) * variable.dtype.itemsize
        if variable.synchronization is Synchronization.PER_REPLICA:
            for name in self.names:
                self._add((name,), "buffers", num_bytes)
            if len(self.names) > 1:  # the user's buffer, with the replicas' mean
                self._add(self.names[:1], "buffers", num_bytes)
            return
        sharing: dict[object, list[str]] = {}
        for device in self.program.devices:
            sharing.setdefault(device.torch_device, []).append(device.name)
        kind = "parameters" if variable.role is Role.PARAMETER else "buffers"
        for names in sharing.values():
            self._add(tuple(names), kind, num_bytes)

    def _copies(self, bucket: Bucket) -> list[Owners]:
        owners: dict[int, list[str]] = {}
        for replica, name in enumerate(self.names):
            owners.setdefault(bucket.owner_of_parameters(replica), []).append(name)
        return [tuple(names) for names in owners.values()]

    def add_bucket(self, bucket: Bucket) -> None:
        for owners in self._copies(bucket):
            self._add(owners, "parameters", bucket.num_bytes)
        if any(bucket_of(node) == bucket.index for node in self._sent_in_part):
            # residuals of error feedback, present and new
            self._add(self.names[:1], "unsent", 2 * bucket.num_bytes)
        if bucket.rule.takes_rows:  # its rows are activations
            return
        pack = pack_of_gradients(self.program, bucket.index)
        shares = left_to_shares(pack) if not bucket.gathers_factors else []  # else each device sums in its own bucket
        left = {str(gradient.kwargs["variable"]) for gradient in shares}
        in_parts = self._elements_in_parts(bucket)
        for replica, name in enumerate(self.names):
            # Factored gradients are summed in the first replica's bucket, or in parts; their other pages are never written.
            untouched = sum(bucket.slot_of[variable].num_elements for variable in left) if replica else in_parts
            self._add((name,), "buckets", bucket.num_bytes - untouched * bucket.dtype.itemsize)
            if self.program.leaves_gradients and replica == 0:
                self._add((name,), "users", bucket.num_bytes)
            elif self.program.accumulation in (Accumulation.ADDS, Accumulation.ENDS):
                self._add((name,), "accumulated", bucket.num_bytes)

    def add_users_gradients(self, state: StepState) -> None:
        for flat in state.users_buckets:
            for name, gradients in zip(self.names, flat.gradients, strict=True):
                self._add((name,), "users_buckets", gradients.nbytes)
        present = (tensor.grad for tensor in state.store.tensors.values() if tensor.is_leaf)
        for gradient in present:
            if gradient is not None:
                parts = (gradient._indices(), gradient._values()) if gradient.is_sparse else (gradient,)
                self._add(self.names[:1], "users", sum(part.nbytes for part in parts))

    def _elements_in_parts(self, bucket: Bucket) -> int:
        """Elements of gradients that are made in parts. Also records each device's memory for a part."""
        num_elements = 0
        for replica, module in enumerate(self.program.device_graphs.values()):
            updates = calls_to(module.graph, ops.update)
            update = next((node for node in updates if bucket_of(node) == bucket.index), None)
            number: Any = update.kwargs.get("part_elements") if update is not None else None
            if update is None or number is None:
                continue
            slots = slots_left_as_factors(self.program, bucket.index)
            for piece in pieces_of_share(bucket, slots, replica, len(self.names)):
                part = piece.largest_part(number, factors_of_shares(self.program, bucket.index))
                self._parts[replica] = max(self._parts[replica], part * bucket.dtype.itemsize)
                num_elements += piece.stop - piece.start if part else 0
        return num_elements

    def add_reserved(self) -> None:
        for name, part_bytes, module in zip(self.names, self._parts, self.program.device_graphs.values(), strict=True):
            blocks: Counter[Any] = Counter()
            for node in calls_to(module.graph, ops.reserved):
                value = node.meta["val"]
                number = node.kwargs["number"]
                blocks[number] = max(blocks[number], value.numel() * value.itemsize)
            self._add((name,), "reserved", blocks.total() + part_bytes)

    def add_state(self, bucket: Bucket, update: UpdateMemory) -> None:
        per_element = sum(dtype.itemsize for dtype in update.state.values())
        scalars = sum(dtype.itemsize for dtype in update.scalars.values())
        shares = [(name, *bucket.updated(replica, len(self.names))) for replica, name in enumerate(self.names)]
        num_elements = bucket.num_elements if bucket.part is None else bucket.part.stop - bucket.part.start
        # each of these has a flat optimizer with its own scalars
        updating = {name for name, start, stop in shares if start < stop}
        copies = self._copies(bucket)
        with_state = [owners for owners in copies if updating.intersection(owners)]
        for owners in with_state:
            num_flat = len(updating.intersection(owners))
            self._add(owners, "optimizer_state", per_element * num_elements + scalars * num_flat)
        # shown in the user's optimizer
        self._add((with_state or copies)[0], "optimizer_state", scalars * len(bucket.slots))

    def add_user_state(self, buckets: Sequence[Bucket], num_bytes: int | None) -> None:
        owners = self._copies(buckets[0])[0]
        kind = buckets[0].rule.label.split(" ")[0]
        self.remarks.append(
            f"{kind} runs by itself: what it takes and frees while it does is not known, and not counted"
        )
        if num_bytes is None:
            self.unknown.add(owners)
            self.remarks.append(f"what state {kind} keeps is not known before its first step; totals are without it")
        else:
            self._add(owners, "optimizer_state", num_bytes)

    def _held(self, owners: Owners) -> HeldMemory:
        counts = self.bytes.get(owners, Counter[str]())
        gradient_parts = {part: counts[part] for part in GRADIENT_PARTS if counts[part]}
        return HeldMemory(
            devices=owners,
            gradients=sum(gradient_parts.values()),
            optimizer_state=None if owners in self.unknown else counts["optimizer_state"],
            gradient_parts=gradient_parts,
            **{kind: counts[kind] for kind in ("parameters", "buffers", "activations", "reserved", "passing_sums")},
        )

    def report(self, walks: Sequence[Ledger]) -> MemoryReport:
        devices = [
            DeviceMemory(
                device=name,
                own=self._held((name,)),
                peak=_peak(walk.peak),
                activation_peak=_peak(walk.activation_peak),
                within_calls={node.name: most for node, most in walk.most_during.items()},
            )
            for name, walk in zip(self.names, walks, strict=True)
        ]
        shared = [self._held(owners) for owners in dict.fromkeys([*self.bytes, *self.unknown]) if len(owners) > 1]
        return MemoryReport(tuple(devices), tuple(shared), tuple(dict.fromkeys(self.remarks)))


def _peak(peak: Peak) -> MemoryPeak:
    if peak.at is None:
        return MemoryPeak(0, "", "", "", ())
    node, step = peak.at
    inner = step.node if step is not None else None
    blocks = [block for block in peak.blocks if block.num_bytes]
    listed = [block for block in blocks[:_MOST_LISTED] if block.num_bytes >= _LEAST_LISTED * peak.num_bytes]
    return MemoryPeak(
        num_bytes=peak.num_bytes,
        call=call_name(node),
        operation=step.call if step is not None else "",
        source=source_line(inner) if inner is not None else source_line(node),
        largest=tuple(LiveValue(block.name, block.type, block.num_bytes) for block in listed),
        num_smaller=len(blocks) - len(listed),
    )
