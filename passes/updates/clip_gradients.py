"""Clips reduced gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from mirrorc.analysis.buckets.rescaling import gradient_takers, measured_elements, numbers_of, replica_commits, taken_by
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Elements
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import bucket_of, calls_to, reached, replica_of
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.ir.type_inference import set_type
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted


@dataclass(frozen=True)
class Bound:
    """A bound for the norm of a group's gradients.

    Attributes:
        max_norm: math.inf measures the norm without scaling.
        group: a group of the optimizer; None for all gradients together.
    """

    max_norm: float
    norm_type: float
    group: int | None

    @property
    def norm_name(self) -> str:
        return "grad_norm" if self.group is None else f"grad_norm_{self.group}"

    def bounds(self, bucket: Bucket) -> bool:
        return self.group is None or bucket.rule.group == self.group


@dataclass(frozen=True)
class ClipGradients:
    """Measures norms of reduced gradients, and scales the operands of updates::

        commit(replica=0)                              wait_0 = wait(rs_0, bucket=0, replica=0)
        wait_0 = wait(rs_0, bucket=0, replica=0)       n_0 = norm(wait_0, norm_type=2.0, replica=0)
        update(wait_0, bucket=0, replica=0)            met = commit(n_0, replica=0)
        (the same on replica 1)                  ->    n = norm(met, norm_type=2.0, replica=0)
                                                       tell(n, what=grad_norm, replica=0)
                                                       f = clip_factor(n, max_norm=1.0, replica=0)
                                                       g = scale(wait_0, f, replica=0)
                                                       update(g, bucket=0, replica=0)
                                                       (the same on replica 1)

    Replicas with shares exchange their norms at the commit; all workers use the chief's result. A replica with whole
    sums needs no exchange. With a sharded optimizer, replicas of all workers exchange norms, and each worker measures
    an equal part of the buckets that all update whole::

        commit(replica=0)                              own = slice(total_1, 0, 64, 128)
        update(part_0, bucket=0, replica=0)      ->    n_0 = norm(part_0, own, norm_type=2.0, replica=0)
        step_optimizer(total_1, ..., replica=0)        met = commit(n_0, replica=0)
                                                       (as above)

    Needs: to run after share-parameters and shard-optimizer.
    Guarantees: each element of a bounded gradient counts once in its norm, and is scaled once, by the same factor on
        all replicas.
    Source: `torch.nn.utils.clip_grad_norm_`.

    Attributes:
        max_norm: a number, or a tuple with one per group. None sets no bound; math.inf only measures.
        norm_type: a type, or a tuple with one per group; math.inf is the largest absolute value.
        max_value: the largest absolute value of an element, applied after scaling; None for no bound.
    """

    max_norm: float | tuple[float | None, ...] | None = None
    norm_type: float | tuple[float, ...] = 2.0
    max_value: float | None = None
    name: str = field(default="clip-gradients", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    trains_only: ClassVar = True
    updates_only: ClassVar = True
    establishes: ClassVar = (Property.CLIPPED,)
    precedes: ClassVar = Property.CLIPPED.and_later

    def __post_init__(self) -> None:
        for bound in self.bounds:
            if not bound.max_norm >= 0:
                raise ValueError(f"MC1002: max_norm is {bound.max_norm!r}: give a number from 0 to math.inf, or None")
            if not bound.norm_type > 0:
                raise ValueError(f"MC1002: norm_type is {bound.norm_type!r}: give a positive number, or math.inf")
        if self.max_value is not None and not self.max_value >= 0:
            raise ValueError(f"MC1002: max_value is {self.max_value!r}: give a number from 0 to math.inf, or None")

    @property
    def bounds(self) -> list[Bound]:
        if self.max_norm is None:
            return []
        if not isinstance(self.max_norm, tuple):
            assert not isinstance(self.norm_type, tuple), "one norm has one type"
            return [Bound(self.max_norm, self.norm_type, None)]
        types = self.norm_type if isinstance(self.norm_type, tuple) else (self.norm_type,) * len(self.max_norm)
        norms = enumerate(zip(self.max_norm, types, strict=True))
        return [Bound(most, kind, group) for group, (most, kind) in norms if most is not None]

    def run(self, program: Program) -> Program:
        graph = copied(program.mirrored_graph)
        program = program.evolve(stage=Stage.SCHEDULED, graph=graph)
        if isinstance(self.max_norm, tuple):
            self._check_groups(program, len(self.max_norm))
        remarks = []
        for bound in self.bounds:
            buckets = [bucket for bucket in program.buckets if bound.bounds(bucket)]
            if buckets:
                are_exchanged = _are_exchanged(program, buckets)
                _bound_norm(program, bound, buckets, are_exchanged=are_exchanged)
                remarks.append(_remark(bound, len(buckets), program, are_exchanged=are_exchanged))
        if self.max_value is not None:
            for taker in list(gradient_takers(graph)):
                words = {"max_value": float(self.max_value), "replica": replica_of(taker)}
                for _, value in taken_by(taker):
                    _rescale(program, taker, value, ops.clip_value, (), words)
            remarks.append(
                f"each element of a gradient is brought to between -{self.max_value:g} and {self.max_value:g}"
            )
        return program.evolve(properties=(*program.properties, Property.CLIPPED)).with_remarks(*remarks)

    def _check_groups(self, program: Program, num_groups: int) -> None:
        beyond = [bucket.rule.group for bucket in program.buckets if bucket.rule.group >= num_groups]
        if beyond:
            raise PassError(
                f"MC4003: max_norm has {counted(num_groups, 'number')}, but the optimizer has a group {max(beyond)}: "
                "give a number, or None, for each group"
            )


def _remark(bound: Bound, num_buckets: int, program: Program, *, are_exchanged: bool) -> str:
    whose = f"gradients of group {bound.group}" if bound.group is not None else "all gradients"
    whose += f" ({counted(num_buckets, 'bucket')})"
    kind = "largest element" if bound.norm_type == math.inf else f"{bound.norm_type:g}-norm"
    what = f"the {kind} of {whose} is only measured"
    if bound.max_norm < math.inf:
        what = f"{whose} are scaled so that their {kind} is at most {bound.max_norm:g}"
    all_devices = "all devices of all workers" if program.has_sharded_optimizer else "all"
    where = f" of its shares, and {all_devices} exchange the norms at the commit" if are_exchanged else ""
    measures = (
        f"each device takes the norm{where}"
        if program.num_replicas > 1 or (program.has_sharded_optimizer and are_exchanged)
        else "the norm is taken when all are there"
    )
    if program.workers.are_several and are_exchanged and not program.has_sharded_optimizer:
        measures += "; all workers go on with worker 0's"
    return f"{what}: {measures}"


def _are_exchanged(program: Program, buckets: Sequence[Bucket]) -> bool:
    """Raises `PassError` if each worker would compute the norm alone: orders of additions would differ."""
    if any(bucket.part is not None for bucket in buckets):
        return True
    if not program.workers.are_several or program.workers.are_alike:
        return program.num_replicas > 1 and any(bucket.updates_by_shares for bucket in buckets)
    if not any(bucket.rule.elementwise for bucket in buckets):
        raise problem(
            PassError,
            f"MC1504: clip_grad_norm cannot bound the gradients of {buckets[0].rule.label} over unlike workers",
            "its optimizer is not element-wise, and workers with other numbers of devices would add up another norm",
            "devices=[...], as many on each worker",
        )
    return True


@dataclass(frozen=True)
class _Sum:
    """A bucket's sum on a replica; ``taker`` is the replica's update with it, if any."""

    value: fx.Node
    bucket: int
    taker: fx.Node | None


def _bound_norm(program: Program, bound: Bound, buckets: Sequence[Bucket], *, are_exchanged: bool) -> None:
    graph = program.mirrored_graph
    commits = replica_commits(graph)
    sums_of = {replica: _sums(graph, replica, buckets) for replica in range(program.num_replicas)}
    if not are_exchanged:  # a replica that updates nothing measures nothing
        sums_of = {replica: sums for replica, sums in sums_of.items() if any(reduced.taker for reduced in sums)}
    anchor = (
        min(commits.values())
        if are_exchanged
        else min(reduced.taker for sums in sums_of.values() for reduced in sums if reduced.taker)
    )
    _move_sums([reduced.value for sums in sums_of.values() for reduced in sums], anchor)
    words: dict[str, Any] = {"norm_type": float(bound.norm_type)}
    for replica, sums in sums_of.items():
        here = {"replica": replica}
        taken = [reduced for reduced in sums if reduced.taker is not None]
        measured = [*taken, *_empty_shares(program, sums, taken, anchor)] if are_exchanged else sums
        values = tuple(_measured_part(program, reduced, anchor, are_exchanged=are_exchanged) for reduced in measured)
        norm = insert(program, anchor, ops.norm, values, words | here)
        if are_exchanged:
            commit = commits[replica]
            row = {"row": len(numbers_of(commit))} if numbers_of(commit) else {}
            commit.args = (*commit.args, norm)
            set_type(program, commit)
            _set_types_behind(program, commit)
        first = min((reduced.taker for reduced in taken if reduced.taker is not None), default=graph.output_node())
        if are_exchanged:
            norm = insert(program, first, ops.norm, (commit,), words | row | here)
        insert(program, first, ops.tell, (norm,), {"what": bound.norm_name} | here)
        if taken and bound.max_norm < math.inf:
            factor = insert(program, first, ops.clip_factor, (norm,), {"max_norm": float(bound.max_norm)} | here)
            for reduced in taken:
                _rescale(program, reduced.taker, reduced.value, ops.scale, (factor,), here)


def _set_types_behind(program: Program, commit: fx.Node) -> None:
    """Infers types again: an additional norm may widen the dtype of the commit's result."""
    for user in list(commit.users):
        if user.target in (ops.norm, ops.clip_factor, ops.tell):
            set_type(program, user)
            _set_types_behind(program, user)


def _measured_part(program: Program, reduced: _Sum, before: fx.Node, *, are_exchanged: bool) -> fx.Node:
    bucket = program.buckets[reduced.bucket]
    elements = measured_elements(program, bucket, are_exchanged=are_exchanged)
    if bucket.part is not None or elements == Elements(0, bucket.num_elements):
        return reduced.value
    return insert(program, before, torch.ops.aten.slice.Tensor, (reduced.value, 0, elements.start, elements.stop))


def _empty_shares(program: Program, sums: Sequence[_Sum], taken: Sequence[_Sum], before: fx.Node) -> Iterator[_Sum]:
    """Yields an empty share of the widest dtype if no measured share has this dtype, so that all norms have one dtype."""
    widths = [program.buckets[reduced.bucket].dtype.itemsize for reduced in taken]
    for reduced in sorted(sums, key=lambda reduced: -program.buckets[reduced.bucket].dtype.itemsize):
        bucket = program.buckets[reduced.bucket]
        if bucket.dtype.itemsize <= max(widths, default=0):
            return
        if bucket.is_cut and bucket.updates_by_shares:  # the replica has every pack, but updates no element
            yield replace(reduced, value=insert(program, before, torch.ops.aten.slice.Tensor, (reduced.value, 0, 0, 0)))
            return
        if bucket.reduces_by_shares:
            yield reduced
            return


def _rescale(
    program: Program, taker: Any, value: fx.Node, operation: Any, args: tuple[fx.Node, ...], words: dict[str, Any]
) -> None:
    taker.replace_input_with(value, insert(program, taker, operation, (value, *args), words))


def _sums(graph: fx.Graph, replica: int, buckets: Sequence[Bucket]) -> list[_Sum]:
    wanted = {bucket.index for bucket in buckets}
    takers = [taker for taker in gradient_takers(graph) if replica_of(taker) == replica]
    sums = [_Sum(value, index, taker) for taker in takers for index, value in taken_by(taker) if index in wanted]
    missing = wanted - {reduced.bucket for reduced in sums}
    launches = tuple(ops.EXCHANGES) if any(calls_to(graph, *ops.EXCHANGES)) else tuple(ops.REDUCTIONS)
    for wait in calls_to(graph, ops.wait):
        if replica_of(wait) == replica and bucket_of(wait) in missing and wait.all_input_nodes[0].target in launches:
            sums.append(_Sum(wait, bucket_of(wait), None))
    return sorted(sums, key=lambda reduced: reduced.value)


def _move_sums(values: Sequence[fx.Node], anchor: fx.Node) -> None:
    def needed(node: fx.Node) -> list[fx.Node]:
        launched = node.all_input_nodes[0].users if node.target is ops.wait else ()
        waits = [user for user in launched if user.target is ops.wait]  # all replicas wait in one order
        return [other for other in (*waits, *node.all_input_nodes) if not other < anchor]

    for node in sorted(reached((value for value in values if value > anchor), needed)):
        anchor.prepend(node)
