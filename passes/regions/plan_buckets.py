"""Plans buckets and packs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from mirrorc.analysis.gradients.sent_factors import sendable, sent_factors
from mirrorc.errors import PassError
from mirrorc.ir.buckets import Bucket, Pack, SentFactors, Slot
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.variables import SHARE_ELEMENTS, UpdateRule, Variable
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted, listed, numbered
from mirrorc.packing import (
    LEAST_ELEMENTS,
    ByBytes,
    EqualPacks,
    EqualSplits,
    Gradient,
    GradientOrder,
    Packing,
    Plan,
    check_order,
    equal_ranges,
    groups_of,
    in_order,
    plan_of,
)

_Kind = tuple[torch.dtype, UpdateRule, bool, str]
"""Dtype, update rule, True if factors are exchanged, and the variable's name if the optimizer takes its rows."""

_ALIGNMENT_BYTES = 64  # a cache line, and more than any vector load needs
_LEAST_PART = 16  # a bucket below a sixteenth of its cap is not worth a message


@dataclass
class _Grouping:
    """The variables of each full bucket, and the numbers of packs of buckets to cut, by the bucket's first variable."""

    closed: list[list[Variable]]
    remarks: list[str]
    num_packs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PlanBuckets:
    """Groups gradients into buckets, in the order of backward.

    All gradients of a bucket have the same dtype, update rule and form of exchange. A table whose optimizer takes rows
    has a bucket alone. A gradient that would exceed the cap opens a new bucket, unless the last is less than a
    sixteenth full. The first cap is smaller, to begin communication early. For a sharded optimizer, buckets are padded
    to equal parts.

    The graph does not change::

        output {gradients: {fc2.weight: t_3, fc2.bias: view, fc1.weight: t_6, fc1.bias: view_1}}

        bucket 0  f32  fc2.weight[10, 512] fc2.bias[10]        <- as planned, in the program's bucket table
        bucket 1  f32  fc1.weight[512, 2048] fc1.bias[512]

    Needs: a captured graph whose output lists gradients in the order of its backward, or of the chief's.
    Guarantees: every gradient has exactly one slot; slots are disjoint, aligned, and inside their bucket.
    Source: PyTorch DDP (Li et al., 2020).

    Other plans have a bucket per gradient or per user-defined group, or cut one bucket of each kind into equal packs.
    Packs are numbered over all buckets, in the order of completion::

        bucket 0  f32  fc2.weight[10, 512] fc2.bias[10] fc1.weight[512, 2048] fc1.bias[512]
        packs, of elements 0 ... 1054207: 0 at 0 ... 527103, 1 at 527104 ... 1054207

    Attributes:
        buckets: the plan, or the cap of `mirrorc.packing.ByBytes` in MiB.
        order: the order of gradients in buckets.
    """

    buckets: Packing = ByBytes()
    order: GradientOrder = "ready"
    name: str = field(default="plan-buckets", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)
    trains_only: ClassVar = True

    def __post_init__(self) -> None:
        plan_of(self.buckets)
        check_order(self.order)

    @property
    def _plan(self) -> Plan:
        return plan_of(self.buckets)

    def run(self, program: Program) -> Program:
        rows = {name for name, variable in program.variables.items() if variable.update and variable.update.takes_rows}
        can_be_sent = {gradient.variable for gradient in sendable(program, 1)} | rows
        chosen = program.workers.sent_as_factors
        as_factors = {name: sent_factors(program, name) for name in chosen if name in can_be_sent}
        without = [name for name in chosen if name in program.variables and name not in can_be_sent]
        factored = {*as_factors, *program.gathered, *rows}
        ready = _gradients(program)
        position = {gradient.name: gradient.ready for gradient in ready}
        try:
            gradients = in_order(ready, self.order, list(program.variables))
            planned = self._planned(program, gradients, factored)
        except (TypeError, ValueError) as error:
            raise PassError(str(error)) from error
        # `order` decides which gradients share a bucket, but buckets are launched in the order in which they are ready
        in_launch_order = sorted(planned.closed, key=lambda members: max(position[member.name] for member in members))
        unit = SHARE_ELEMENTS * program.workers.num_workers if program.workers.shards_optimizer else 1
        buckets = [_bucket(i, members, as_factors, unit) for i, members in enumerate(in_launch_order)]
        buckets = [replace(b, gathers_factors=b.slots[0].variable in program.gathered) for b in buckets]
        buckets = _cut(program, buckets, _equal_packs(buckets, planned.num_packs, position))
        remarks = [*planned.remarks, *_pack_remarks(buckets, planned.num_packs)]
        result = program.evolve(buckets=tuple(buckets)).with_remarks(*remarks, is_kept=False)
        alike = "one dtype and one update rule" + (", sent to other workers in one way" if as_factors else "")
        alike += ", sent to other devices in one way" if program.gathered else ""
        num_kinds = len({_kind(member, factored) for members in in_launch_order for member in members})
        kinds = f"{num_kinds} kinds of bucket: a bucket holds {alike}"
        verb = "goes" if len(without) == 1 else "go"
        whole = f"{listed(without)} {verb} to other workers whole: no factors of the gradient exist in this program"
        more = [*([kinds] if num_kinds > 1 else []), *([whole] if without else [])]
        return result.with_remarks(self._remark(buckets), *more)

    def _planned(self, program: Program, gradients: Sequence[Gradient], as_factors: Collection[str]) -> _Grouping:
        plan = self._plan
        if isinstance(plan, ByBytes):
            return _by_bytes(plan, program, gradients, as_factors)
        if isinstance(plan, EqualPacks | EqualSplits):
            return _equal(plan, program, gradients, as_factors)
        return _by_groups(groups_of(plan, gradients), program, as_factors)

    def _remark(self, buckets: Sequence[Bucket]) -> str:
        number = counted(sum(len(bucket.slots) for bucket in buckets), "gradient")
        plan, order = self._plan, self._order_text()
        if not isinstance(plan, ByBytes):
            whose = plan if isinstance(plan, EqualPacks | EqualSplits) else f"the groups of buckets={_name(plan)}"
            return f"{number} in {counted(len(buckets), 'bucket')}{order}: {whose}"
        if len(buckets) == 1:
            return f"{number} in one bucket" + ("" if self.order == "ready" else order)
        first_mb, cap_mb = (cap / 2**20 for cap in plan.caps)
        return (
            f"{number} in {len(buckets)} buckets{order}: a gradient that would take a bucket "
            f"over {cap_mb:g} MiB (bucket 0: {first_mb:g} MiB) opens the next{_excess_text(buckets, plan)}"
        )

    def _order_text(self) -> str:
        if self.order == "ready":
            return ", in the order in which backward makes them"
        if self.order == "reversed":
            return ", in the reverse of the order in which the model registers their parameters"
        return f", in the order of order={_name(self.order)}"


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _kind(variable: Variable, as_factors: Collection[str]) -> _Kind:
    assert variable.update is not None, f"{variable.name} has a gradient that nothing uses"
    table = variable.name if variable.update.takes_rows else ""
    return variable.dtype, variable.update, variable.name in as_factors, table


def _by_bytes(plan: ByBytes, program: Program, gradients: Sequence[Gradient], as_factors: Collection[str]) -> _Grouping:
    open_buckets: dict[_Kind, list[Variable]] = {}
    num_bytes: dict[_Kind, int] = {}  # of each open bucket
    closed: list[list[Variable]] = []
    opened: list[str] = []
    first_cap, other_cap = plan.caps
    for name, *_ in gradients:
        variable = program.variables[name]
        key = _kind(variable, as_factors)
        members = open_buckets.setdefault(key, [])
        cap = first_cap if not closed else other_cap
        before, added = num_bytes.get(key, 0), _num_bytes(variable)
        if members and before + added > cap and before >= cap / _LEAST_PART:
            opened.append(f"{name} opens a new bucket: with it the last would be over {cap / 2**20:g} MiB")
            closed.append(members)
            members, before = [], 0
            open_buckets[key] = members
        members.append(variable)
        num_bytes[key] = before + added
    closed.extend(members for members in open_buckets.values() if members)
    return _Grouping(closed, opened)


def _by_groups(groups: Sequence[Sequence[Gradient]], program: Program, as_factors: Collection[str]) -> _Grouping:
    closed: list[list[Variable]] = []
    remarks = []
    for group in groups:
        kinds = _kinds(program, group, as_factors)
        closed += kinds
        if len(kinds) > 1:
            others = [members[0].name for members in kinds]
            remarks.append(
                f"the group of {others[0]} becomes {len(kinds)} buckets: {listed(others[1:])} and what is like it follow another "
                "update rule, or are sent to others in another way"
            )
    return _Grouping(closed, remarks)


def _kinds(program: Program, gradients: Sequence[Gradient], as_factors: Collection[str]) -> list[list[Variable]]:
    kinds: dict[_Kind, list[Variable]] = {}
    for gradient in gradients:
        variable = program.variables[gradient.name]
        kinds.setdefault(_kind(variable, as_factors), []).append(variable)
    return list(kinds.values())


def _equal(
    plan: EqualPacks | EqualSplits, program: Program, gradients: Sequence[Gradient], as_factors: Collection[str]
) -> _Grouping:
    """A bucket per kind, to be cut into packs. For kinds that cannot be cut, a bucket per gradient."""
    number = plan.num_packs if isinstance(plan, EqualPacks) else plan.num_splits
    alone = [[program.variables[gradient.name]] for gradient in gradients]
    if number == 0:
        return _Grouping(alone, ["each gradient is reduced by itself: nothing is packed"])
    dtypes = dict.fromkeys(str(gradient.dtype) for gradient in gradients)
    if isinstance(plan, EqualSplits) and len(dtypes) > 1:
        why = f"{plan} declines: gradients are {listed(dtypes)}, and a pack has one dtype; each is reduced by itself"
        return _Grouping(alone, [why])
    closed, remarks, num_packs = [], [], {}
    for members in _kinds(program, gradients, as_factors):
        if members[0].name in as_factors:
            closed.append(members)
            remarks.append(f"{members[0].name} and what is sent as factors with it: not cut, as factors make no packs")
            continue
        num_elements = sum(math.prod(member.shape) for member in members)
        if isinstance(plan, EqualSplits) and num_elements < number * LEAST_ELEMENTS:
            closed += [[member] for member in members]
            remarks.append(
                f"{plan} declines {members[0].name} and what is updated like it: {num_elements} elements in {number} packs are "
                f"fewer than {LEAST_ELEMENTS} each; each gradient is reduced by itself"
            )
            continue
        closed.append(members)
        num_packs[members[0].name] = number
    return _Grouping(closed, remarks, num_packs)


def _equal_packs(
    buckets: Sequence[Bucket], num_packs: Mapping[str, int], position: Mapping[str, int]
) -> list[tuple[int, tuple[int, int]]]:
    packs: list[tuple[int, int, tuple[int, int]]] = []  # the time of completion, the bucket, its elements
    for bucket in buckets:
        for start, stop in equal_ranges(bucket.num_elements, num_packs.get(bucket.slots[0].variable, 1)):
            slots = bucket.slots_in(Pack(0, start, stop))
            packs.append((max(position[slot.variable] for slot in slots), bucket.index, (start, stop)))
    return [(index, elements) for _, index, elements in sorted(packs)]


def _cut(program: Program, buckets: list[Bucket], ranges: Sequence[tuple[int, tuple[int, int]]]) -> list[Bucket]:
    if len(ranges) == len(buckets):
        return buckets
    if program.workers.shards_optimizer:
        raise problem(
            PassError,
            "MC4003: pass 'plan-buckets': a bucket that is cut into packs cannot be sharded over workers",
            "workers get parts of whole buckets",
            ("leave shard_optimizer= out", "buckets=25, or another plan that does not cut"),
        )
    packs: dict[int, list[Pack]] = {}
    for number, (index, elements) in enumerate(ranges):
        packs.setdefault(index, []).append(Pack(number, *elements))
    by_start = {index: sorted(of_bucket, key=lambda pack: pack.start) for index, of_bucket in packs.items()}
    return [replace(bucket, packs=tuple(by_start[bucket.index])) for bucket in buckets]


def _pack_remarks(buckets: Sequence[Bucket], num_packs: Mapping[str, int]) -> list[str]:
    remarks = []
    for bucket in buckets:
        asked = num_packs.get(bucket.slots[0].variable, 0)
        if not asked:
            continue
        if len(bucket.launch_units) < asked:
            remarks.append(
                f"bucket {bucket.index} has {counted(len(bucket.launch_units), 'pack')}, not {asked}: it has as many elements"
            )
        starts = {pack.start for pack in bucket.packs}
        parted = [
            slot.variable
            for slot in bucket.slots
            if any(slot.offset < start < slot.offset + slot.num_elements for start in starts)
        ]
        if parted:
            remarks.append(
                f"bucket {bucket.index}: {listed(parted)} {'lies' if len(parted) == 1 else 'lie'} in several packs"
            )
    return remarks


def _gradients(program: Program) -> list[Gradient]:
    output = program.shard_graphs[0].output_node().args[0]
    assert isinstance(output, dict)
    variables = [program.variables[name] for name in output["gradients"]]
    return [
        Gradient(variable.name, math.prod(variable.shape), variable.dtype, ready)
        for ready, variable in enumerate(variables)
    ]


def _bucket(index: int, members: list[Variable], as_factors: Mapping[str, SentFactors], unit: int) -> Bucket:
    slots, offset = [], 0
    for variable in members:
        num_elements = math.prod(variable.shape)
        slots.append(Slot(variable.name, variable.shape, variable.strides, offset, num_elements))
        offset += _aligned(num_elements, variable.dtype)
    assert members[0].update is not None
    sent = tuple(as_factors[member.name] for member in members if member.name in as_factors)
    num_elements = -(-offset // unit) * unit
    return Bucket(index, members[0].dtype, tuple(slots), num_elements, members[0].update, sent_factors=sent)


def _excess_text(buckets: Sequence[Bucket], plan: ByBytes) -> str:
    first, other = plan.caps
    larger = [b for b in buckets if len(b.slots) > 1 and _slot_bytes(b) > (other if b.index else first)]
    if not larger:
        return ""
    names = numbered("bucket", [bucket.index for bucket in larger])
    return f"; the last gradient of {names} goes beyond that, as less than a sixteenth was full before it"


def _slot_bytes(bucket: Bucket) -> int:
    return sum(_aligned(slot.num_elements, bucket.dtype) for slot in bucket.slots) * bucket.dtype.itemsize


def _num_bytes(variable: Variable) -> int:
    return _aligned(math.prod(variable.shape), variable.dtype) * variable.dtype.itemsize


def _aligned(num_elements: int, dtype: torch.dtype) -> int:
    unit = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
    return max(1, -(-num_elements // unit)) * unit  # one unit for an empty parameter, so that no bucket is empty
