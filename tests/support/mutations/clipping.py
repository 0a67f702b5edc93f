"""Mutations of how gradients are measured and scaled before updates take them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.buckets.rescaling import scaling_factor
from mirrorc.ir import ops
from mirrorc.ir.nodes import replica_of
from mirrorc.ir.program import Program
from mutations.places import (
    bypass,
    insert_like,
    next_like,
    placed_nodes,
    repeat,
    timelines,
    with_argument,
    with_keywords,
    without,
)
from mutations.table import Edit, breaks, keeps


@breaks
def take_what_is_not_clipped(program: Program) -> Iterator[Edit]:
    """An update takes a gradient as it was before it was scaled, or clipped."""
    for node in placed_nodes(program, *ops.RESCALING):
        yield partial(bypass, node)
    for node in placed_nodes(program, ops.update):
        if len(node.args) > 1:
            yield partial(setattr, node, "args", node.args[:1])


@breaks
def measure_less(program: Program) -> Iterator[Edit]:
    """A norm leaves out one of the sums."""
    for node in placed_nodes(program, ops.norm):
        for place in range(len(node.args)) if len(node.args) > 1 else ():
            yield partial(setattr, node, "args", without(node.args, place))


@breaks
def measure_one_twice(program: Program) -> Iterator[Edit]:
    """A norm counts one of the sums twice."""
    for node in placed_nodes(program, ops.norm):
        if all(operand.target is not ops.commit and _has_elements(operand) for operand in node.all_input_nodes):
            yield partial(setattr, node, "args", (*node.args, node.args[0]))


def _has_elements(value: fx.Node) -> bool:
    """Whether there is anything to measure; a replica that owns nothing has a share without elements."""
    return bool(value.meta["val"].numel())


@breaks
def measure_elements_of_others(program: Program) -> Iterator[Edit]:
    """A worker measures a sum that every worker has as if others did not measure their elements of it."""
    for node in placed_nodes(program, torch.ops.aten.slice.Tensor):
        if any(user.target is ops.norm for user in node.users):
            yield partial(bypass, node)
            if node.args[2] != 0:
                yield partial(setattr, node, "args", (*node.args[:2], 0, node.args[3]))


@breaks
def scale_twice(program: Program) -> Iterator[Edit]:
    """A gradient is scaled once more where it lies."""
    for node in placed_nodes(program, *ops.RESCALING):
        yield partial(repeat, node)
    for node in placed_nodes(program, ops.update):
        if len(node.args) > 1:
            yield partial(setattr, node, "args", (*node.args, node.args[1]))
            yield partial(_scale_before, node)


def _scale_before(update: fx.Node) -> None:
    """Scales what an update takes, which scales by itself."""
    source: Any = update.args[0]
    with update.graph.inserting_before(update):
        words = {key: value for key, value in update.kwargs.items() if key == "replica"}
        made = update.graph.call_function(ops.scale, update.args, words)
    made.meta["val"] = source.meta["val"]
    with_argument(update, 0, made)


@breaks
def measure_in_another_way(program: Program) -> Iterator[Edit]:
    """One norm is of another type than those that it is put together with, or than that of another replica."""
    is_alone = program.num_replicas == 1
    for node in placed_nodes(program, ops.norm) if not is_alone else ():
        yield partial(with_keywords, node, norm_type=float(node.kwargs["norm_type"]) + 1.0)  # type: ignore[arg-type]


@breaks
def clip_otherwise_on_one_replica(program: Program) -> Iterator[Edit]:
    """A replica has another bound than the others."""
    for node in placed_nodes(program, ops.clip_factor, ops.clip_value) if program.num_replicas > 1 else ():
        (bound,) = (key for key in ("max_norm", "max_value") if key in node.kwargs)
        updated = {replica_of(n) for n in placed_nodes(program, *ops.RESCALING)}
        clip = [any(n.target in (ops.clip_factor, ops.clip_value) for n in line) for line in timelines(program)]
        if len(updated) > 1 or (program.device_graphs and sum(clip) > 1):
            yield partial(with_keywords, node, **{bound: float(node.kwargs[bound]) / 2})  # type: ignore[arg-type]


@breaks
def exchange_less(program: Program) -> Iterator[Edit]:
    """A replica leaves out a number that all exchange."""
    for commit in placed_nodes(program, ops.commit):
        for place, operand in enumerate(commit.args):
            if operand.target is ops.norm:  # type: ignore[union-attr]
                yield partial(setattr, commit, "args", without(commit.args, place))


@breaks
def scale_by_another_factor(program: Program) -> Iterator[Edit]:
    """A gradient is scaled by the factor of another group, or by the norm itself."""
    for timeline in timelines(program):
        factors = [node for node in timeline if node.target is ops.clip_factor]
        for node in (n for n in timeline if scaling_factor(n) is not None):
            own = node.args[1]
            other = next_like(own, [factor for factor in factors if factor < node])  # type: ignore[arg-type]
            if other is not None and other is not own:
                yield partial(with_argument, node, 1, other)
            yield partial(with_argument, node, 1, own.all_input_nodes[0])  # type: ignore[union-attr]


@breaks
def divide_by_no_scale(program: Program) -> Iterator[Edit]:
    """A norm, or a factor, is not divided by the scale of the loss."""
    for node in placed_nodes(program, torch.ops.aten.div.Tensor):
        if getattr(node.args[-1], "target", None) is ops.loss_scale:
            yield partial(bypass, node)


@breaks
def divide_twice(program: Program) -> Iterator[Edit]:
    """A norm, or a factor, is divided by the scale of the loss twice."""
    for node in placed_nodes(program, torch.ops.aten.div.Tensor):
        if getattr(node.args[-1], "target", None) is ops.loss_scale:
            yield partial(insert_like, node, torch.ops.aten.div.Tensor, node.args[-1])


@breaks
def tell_of_a_part(program: Program) -> Iterator[Edit]:
    """What is told is the norm of a replica's shares alone, which are not all."""
    lines = [[*timeline] for timeline in timelines(program)]
    partial_norms = [[n for n in line if n.target is ops.norm and _is_exchanged(n)] for line in lines]
    measure = [any(_has_elements(value) for norm in norms for value in norm.all_input_nodes) for norms in partial_norms]
    for line, norms, measures in zip(lines, partial_norms, measure, strict=True):
        for node in (n for n in line if n.target is ops.tell):
            for norm in norms[:1] if sum(measure) > measures or program.has_sharded_optimizer else ():
                yield partial(with_argument, node, 0, norm)


def _is_exchanged(norm: fx.Node) -> bool:
    return any(user.target is ops.commit for user in norm.users)


@keeps
def tell_later(program: Program) -> Iterator[Edit]:
    """A norm is told at the end."""
    for node in placed_nodes(program, ops.tell):
        yield partial(node.graph.output_node().prepend, node)
