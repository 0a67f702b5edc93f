"""Scaling and clipping of gradients, and their norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.buckets.bucket_parts import BucketParts, Part
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Elements
from mirrorc.ir.links import SumPlace, link_named
from mirrorc.ir.nodes import calls_to, replica_of
from mirrorc.ir.program import Program


def before_rescaling(value: fx.Node) -> fx.Node:
    rescalings: Any = rescalings_of(value)
    return rescalings[0].args[0] if rescalings else value


def rescalings_of(value: fx.Node) -> list[fx.Node]:
    rescalings = []
    while value.target in ops.RESCALING and value.args and isinstance(value.args[0], fx.Node):
        rescalings.append(value)
        value = value.args[0]
    return rescalings[::-1]


def scaling_factor(node: fx.Node) -> Any:
    return node.args[1] if node.target in (ops.scale, ops.update) and len(node.args) > 1 else None


def rescalings_for(taker: fx.Node, value: fx.Node) -> list[fx.Node]:
    return [*rescalings_of(value), *([taker] if scaling_factor(taker) is not None else [])]


def gradient_takers(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes that use gradients: updates, or their equivalents in a program without updates."""
    return calls_to(graph, ops.update, ops.step_optimizer, ops.accumulate, ops.add_to_grad)


def taken_by(taker: fx.Node) -> list[tuple[int, fx.Node]]:
    indices: Any = taker.kwargs.get("buckets") or (taker.kwargs["bucket"],)
    return [(index, value) for index, value in zip(indices, taker.args, strict=False) if isinstance(value, fx.Node)]


@dataclass(frozen=True)
class Factor:
    """``clips`` is the `clip_factor` in a factor, if any. ``unscales``: the factor also undoes the loss scale."""

    clips: fx.Node | None
    unscales: bool


def factor_of(value: Any) -> Factor | None:
    if getattr(value, "target", None) is ops.clip_factor:
        return Factor(value, unscales=False)
    if _is_scale(value, torch.ops.aten.reciprocal.default):
        return Factor(None, unscales=True)
    if _is_scale(value, torch.ops.aten.div.Tensor) and value.args[0].target is ops.clip_factor:
        return Factor(value.args[0], unscales=True)
    return None


def norm_in(value: Any) -> tuple[Any, bool]:
    is_unscaled = _is_scale(value, torch.ops.aten.div.Tensor)
    return (value.args[0] if is_unscaled else value), is_unscaled


def _is_scale(value: Any, target: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is target and value.args[-1].target is ops.loss_scale  # type: ignore[union-attr]


def measured_elements(program: Program, bucket: Bucket, *, are_exchanged: bool) -> Elements:
    """The elements whose norm a worker computes: its part of a sharded optimizer if workers exchange norms, else all."""
    if not (program.has_sharded_optimizer and are_exchanged):
        return Elements(0, bucket.num_elements)
    if bucket.part is not None:
        return bucket.part
    rank, number = program.workers.rank, program.workers.num_workers
    return Elements(bucket.num_elements * rank // number, bucket.num_elements * (rank + 1) // number)


def is_checked(commit: fx.Node) -> bool:
    return commit.kwargs.get("otherwise") is not None


def truths_of(commit: fx.Node) -> list[fx.Node]:
    return [operand for operand in commit.args if isinstance(operand, fx.Node) and operand.target is not ops.norm]


def numbers_of(commit: fx.Node) -> list[fx.Node]:
    """A commit's norms, in the order of the rows of its result."""
    return [operand for operand in commit.args if isinstance(operand, fx.Node) and operand.target is ops.norm]


@dataclass(frozen=True)
class NormOperands:
    """``parts`` are the bucket elements of each operand, on all replicas if commits exchange norms (``is_exchanged``)."""

    norm_type: float
    parts: tuple[Part | None, ...]
    is_exchanged: bool


class Norms:
    """The norms of a program over all replicas, from UPDATED on."""

    def __init__(self, program: Program) -> None:
        self._parts = BucketParts(program)
        self._all_commits = [node for graph in program.graphs() for node in calls_to(graph, ops.commit)]

    def of(self, node: fx.Node) -> NormOperands | None:
        """None if the node is not a norm, or if a norm of this type is missing in a commit."""
        if node.target is not ops.norm:
            return None
        norm_type = float(node.kwargs["norm_type"])  # type: ignore[arg-type]
        if ops.commit not in _targets(node):
            return NormOperands(norm_type, tuple(map(self._parts.of, node.args)), is_exchanged=False)
        if len(node.args) != 1:
            return None
        row: Any = node.kwargs.get("row", 0)
        parts: list[Part | None] = []
        for commit in self._all_commits:
            numbers = numbers_of(commit)
            part = self.of(numbers[row]) if row < len(numbers) and ops.commit not in _targets(numbers[row]) else None
            if part is None or part.norm_type != norm_type:
                return None
            parts += part.parts
        return NormOperands(norm_type, tuple(parts), is_exchanged=True)


def _targets(node: fx.Node) -> list[object]:
    return [operand.target for operand in node.all_input_nodes]


def replica_commits(graph: fx.Graph) -> dict[int | None, fx.Node]:
    return {replica_of(node): node for node in calls_to(graph, ops.commit)}


def has_exclusive_memory(value: Any) -> bool:
    """True for a lowered program's reduced gradient in memory that nothing else reads."""
    if value.target in ops.RESCALING or value.target in (ops.pack, ops.add_accumulated, ops.decompress):
        return True  # it was made so, or there is one replica
    if value.target is ops.unpack:
        return all(map(has_exclusive_memory, value.all_input_nodes))
    launch = value.all_input_nodes[0] if value.target is ops.wait else None
    if launch is not None and launch.target in ops.EXCHANGES:
        return True  # it was the replica's own part of its worker's sum
    if launch is None or launch.target not in ops.REDUCTIONS:
        return False
    is_in_each = launch.target in ops.SHARED_OUT or launch.target is ops.all_gather
    return is_in_each or link_named(launch.kwargs["link"]).sum_place is not SumPlace.FIRST


def is_known_by_rows(wait: fx.Node) -> bool:
    """True for a share whose norms and checks can be computed from the rows of its tables."""
    asking = [user for user in wait.users if user.target in (ops.norm, ops.is_finite)]
    takers = [user for user in wait.users if user not in asking]
    return (
        wait.all_input_nodes[0].target is ops.reduce_scatter
        and bool(asking)
        and bool(takers)
        and all(taker.target in (ops.update, ops.scale) for taker in takers)
        and all(float(user.kwargs["norm_type"]) == 2.0 for user in asking if user.target is ops.norm)  # type: ignore[arg-type]
    )
