"""Decides which gradient goes in which bucket, and in which order buckets are reduced."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from mirrorc.analysis.sent_factors import sent_factors
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, SentFactors, Slot
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.shares import SHARE_ELEMENTS
from mirrorc.ir.variables import UpdateRule, Variable
from mirrorc.printing.wording import counted, numbered

_Kind = tuple[torch.dtype, UpdateRule, bool]
"""What all gradients of a bucket have alike: dtype, update rule, and whether workers send their factors."""

_NUM_LATE = 4  # buckets, about, of gradients that come when forward needs their parameters
_ALIGNMENT_BYTES = 64  # a cache line, and more than any vector load needs


@dataclass(frozen=True)
class PlanBuckets:
    """Groups gradients into buckets, in the order in which backward makes them.

    A bucket holds one dtype and one update rule, and over several workers gradients that are sent alike: as sums, or as factors,
    if the program names them (`mirrorc.ir.workers.Workers.sent_as_factors`). It is cut at variable boundaries: a gradient that
    would take it over its cap opens the next one. The first bucket has a smaller cap, so that communication begins early. Buckets
    are numbered in the order in which they become ready, which reverses the forward's. Where each worker updates a part of every
    bucket alone, buckets are padded to lengths that make these parts equal.

    Where the next step begins while the last buckets are in flight (``by_need``, see `OverlapNextStep`), those that come last, up
    to a third of all bytes, are numbered in the order in which forward reads their parameters, so that each arrives when it is
    needed; all of them become ready when backward ends. A third, because forward takes about a third of a step: the lane has as
    much time for these as for the others. Their cap is a quarter of that, as forward waits for the first of them.

    The graph stays as it is::

        output {gradients: {fc2.weight: t_3, fc2.bias: view, fc1.weight: t_6, fc1.bias: view_1}}

        bucket 0  f32  fc2.weight[10, 512] fc2.bias[10]        <- as planned, in the program's bucket table
        bucket 1  f32  fc1.weight[512, 2048] fc1.bias[512]

    Needs: a captured graph whose output lists gradients in program order.
    Guarantees: every gradient in exactly one slot; slots disjoint, aligned, inside their bucket.
    Source: PyTorch DDP (Li et al., 2020) for the first small bucket and the reversed order.

    Attributes:
        bucket_cap_mb: cap of a bucket, in MiB.
        first_bucket_mb: cap of bucket 0, in MiB.
        by_need: whether the last buckets are numbered in the order in which forward reads their parameters.
    """

    bucket_cap_mb: float = 25.0
    first_bucket_mb: float = 1.0
    by_need: bool = False
    name: str = field(default="plan-buckets", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)
    trains_only: ClassVar = True

    def __post_init__(self) -> None:
        for option in ("bucket_cap_mb", "first_bucket_mb"):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or math.isnan(value):
                raise ValueError(f"{option} is {value!r}: give a positive number of MiB (math.inf for one bucket)")

    def run(self, program: Program) -> Program:
        open_buckets: dict[_Kind, list[Variable]] = {}
        as_factors = {name: sent_factors(program, name) for name in program.workers.sent_as_factors}
        closed: list[list[Variable]] = []
        opened: list[str] = []
        gradients = _gradients(program)
        position = {name: i for i, name in enumerate(gradients)}
        late = _last_third(program, gradients) if self.by_need else {}
        late_cap = sum(late.values()) / _NUM_LATE
        for name in gradients:
            variable = program.variables[name]
            assert variable.update is not None, f"{name} has a gradient that nothing uses"
            key = (variable.dtype, variable.update, name in as_factors)
            members = open_buckets.setdefault(key, [])
            cap_mb = self.first_bucket_mb if not closed else self.bucket_cap_mb
            why = _why_new(members, variable, late, cap_mb * 2**20, late_cap) if members else ""
            if why:
                opened.append(f"{name} opens a new bucket: {why}")
                closed.append(members)
                members = open_buckets[key] = []
            members.append(variable)
        closed.extend(members for members in open_buckets.values() if members)
        closed.sort(key=lambda members: position[members[-1].name])
        closed = _last_by_need(program, closed, late) if late else closed
        unit = SHARE_ELEMENTS * program.workers.num_workers if program.workers.shards_optimizer else 1
        buckets = tuple(_bucket(i, members, as_factors, unit) for i, members in enumerate(closed))
        planned = program.evolve(buckets=buckets).with_remarks(*opened, is_kept=False)
        alike = "one dtype and one update rule" + (", sent to other workers in one way" if as_factors else "")
        kinds = f"{len(open_buckets)} kinds of bucket: a bucket holds {alike}"
        needed = [bucket.index for bucket in buckets if bucket.slots[0].variable in late]
        by_need = (
            f"{numbered('bucket', needed)}, a third of all bytes, in the order in which forward reads their parameters"
        )
        return planned.with_remarks(
            self._remark(buckets), *([kinds] if len(open_buckets) > 1 else []), *([by_need] if len(needed) > 1 else [])
        )

    def _remark(self, buckets: Sequence[Bucket]) -> str:
        """Says what was planned, and by which rule buckets are closed."""
        number = counted(sum(len(bucket.slots) for bucket in buckets), "gradient")
        if len(buckets) == 1:
            return f"{number} in one bucket"
        return (
            f"{number} in {len(buckets)} buckets, in the order in which backward makes them: a gradient that would take a bucket "
            f"over {self.bucket_cap_mb:g} MiB (bucket 0: {self.first_bucket_mb:g} MiB) opens the next"
        )


def _gradients(program: Program) -> list[str]:
    output = program.shard_graphs[0].output_node().args[0]
    assert isinstance(output, dict)
    return list(output["gradients"])


def _why_new(
    members: Sequence[Variable], variable: Variable, late: Collection[str], cap: float, late_cap: float
) -> str:
    """Why a variable's gradient opens a new bucket, after those of ``members``; empty if it does not. Caps are in bytes."""
    before = sum(map(_num_bytes, members))
    if before + _num_bytes(variable) > cap:
        return f"with it the last would be over {cap / 2**20:g} MiB"
    if variable.name not in late:
        return ""
    if members[-1].name not in late:
        return "it is the first of those that come when forward needs their parameters"
    return f"the last has {late_cap / 2**20:.3g} MiB" if before >= late_cap else ""


def _last_third(program: Program, gradients: Sequence[str]) -> dict[str, int]:
    """The gradients that come last in backward, up to a third of all bytes, and the bytes of each."""
    sizes = {name: _num_bytes(program.variables[name]) for name in gradients}
    found: dict[str, int] = {}
    for name in reversed(gradients):
        if found and 3 * (sum(found.values()) + sizes[name]) > sum(sizes.values()):
            break
        found[name] = sizes[name]
    return found


def _last_by_need(program: Program, closed: Sequence[list[Variable]], late: Collection[str]) -> list[list[Variable]]:
    """The buckets, those of late gradients in the order in which forward reads their parameters, behind all others."""
    graph = program.shard_graphs[0]
    place = {node: i for i, node in enumerate(graph.nodes)}
    first = {
        str(read.kwargs["variable"]): min((place[user] for user in read.users), default=len(place))
        for read in calls_to(graph, ops.read)
    }
    early = [members for members in closed if members[0].name not in late]
    needed = [members for members in closed if members[0].name in late]
    return [*early, *sorted(needed, key=lambda members: min(first[member.name] for member in members))]


def _bucket(index: int, members: list[Variable], as_factors: Mapping[str, SentFactors], unit: int) -> Bucket:
    """A bucket of these gradients, whose length is a multiple of ``unit``."""
    slots, offset = [], 0
    for variable in members:
        num_elements = math.prod(variable.shape)
        slots.append(Slot(variable.name, variable.shape, variable.strides, offset, num_elements))
        offset += _aligned(num_elements, variable.dtype)
    assert members[0].update is not None
    sent = tuple(as_factors[member.name] for member in members if member.name in as_factors)
    num_elements = -(-offset // unit) * unit
    return Bucket(index, members[0].dtype, tuple(slots), num_elements, members[0].update, sent_factors=sent)


def _num_bytes(variable: Variable) -> int:
    return _aligned(math.prod(variable.shape), variable.dtype) * variable.dtype.itemsize


def _aligned(num_elements: int, dtype: torch.dtype) -> int:
    unit = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
    return max(1, -(-num_elements // unit)) * unit  # one unit for an empty parameter, so that no bucket is empty
