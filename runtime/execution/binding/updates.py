"""Nodes that measure and scale gradients, update parameters, or keep gradients for later."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.buckets.bucket_parts import slots_in
from mirrorc.analysis.buckets.rescaling import has_exclusive_memory, scaling_factor
from mirrorc.analysis.gradients.tiled_updates import part_elements_of
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, pack_of
from mirrorc.ir.value_types import value_type
from mirrorc.runtime.execution.binding.binder import Binder, binds
from mirrorc.runtime.execution.commit.part_visitors import BoundVisitor, NormVisitor, norm_of, norms_of_all
from mirrorc.runtime.state.evaluation_state import EvaluationState
from mirrorc.runtime.state.gradient_state import GradientState
from mirrorc.runtime.state.gradients.accumulated_gradients import AccumulatedGradients
from mirrorc.runtime.state.optimizers.flat_optimizer import FlatOptimizer, SlotOptimizer
from mirrorc.runtime.state.shares.deferred_tables import DeferredTables
from mirrorc.runtime.state.shares.pieces import UnmadeShare, bounding_by, forget_writes, scaling_by
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.state.variables.layout import OF_PARTS
from mirrorc.torch_internals import scale_each

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_SMALLEST = torch.finfo(torch.float32).tiny  # what is smaller has no inverse


@binds(ops.loss_scale)
def _bind_loss_scale(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    assert isinstance(binder.state, StepState) and binder.state.loss_scale is not None, "it was compiled for a scaler"
    scale = binder.state.loss_scale
    return lambda **_: scale.on(replica)


@binds(ops.tell)
def _bind_tell(binder: Binder, replica: int, node: fx.Node) -> Callable[..., None]:
    assert isinstance(binder.state, StepState), "an evaluation has no gradients"
    values, name = binder.state.results, str(node.kwargs["what"])

    def tell(value: torch.Tensor, **_: Any) -> None:
        if replica == 0:
            values[name] = value

    return tell


@binds(ops.norm)
def _bind_norm(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    norm_type, row = float(node.kwargs["norm_type"]), int(node.kwargs.get("row", 0))  # type: ignore[arg-type]
    dtype = value_type(node.meta["val"])[3]
    if node.all_input_nodes[0].target is ops.commit:
        return lambda met, **_: torch.linalg.vector_norm(met[row], norm_type, dtype=dtype)

    node_visitors = [binder.visitors.get((value, node)) for value in node.args]
    visitors = [visitor for visitor in node_visitors if isinstance(visitor, NormVisitor)]
    deferred = [binder.deferred[value] for value in node.args if value in binder.deferred]

    def norm(*values: torch.Tensor, **_: Any) -> torch.Tensor:
        of_tables = DeferredTables.measure(deferred)
        norms = norms_of_all(visitors, norm_type, dtype)
        if of_tables is not None:
            norms.append(torch.tensor(of_tables, dtype=dtype))
        for value, visitor in zip(values, node_visitors, strict=True):
            if visitor is None and value.numel():
                norms.append(norm_of(value, norm_type, dtype))
        if not norms:  # the share of a small bucket
            return torch.zeros((), dtype=dtype, device=values[0].device)
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)

    return norm


@binds(ops.clip_factor)
def _bind_clip_factor(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    return lambda norm, *, max_norm, **_: torch.clamp(max_norm / (norm + _EPSILON), max=1.0)


@binds(ops.scale)
def _bind_scale(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    return scaling(binder, replica, node)


def making_deferred(binder: Binder, gradient: Any) -> Callable[[], None]:
    deferred = binder.deferred.get(gradient)
    return deferred.make if deferred is not None else lambda: None


def scaling(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    if not has_exclusive_memory(node.args[0]):
        return lambda gradient, factor, **_: gradient.mul(factor)

    make_deferred, few = making_deferred(binder, node.args[0]), binder.few_made(replica, node.args[0])
    part = binder.parts.of(node.args[0])
    slots = [(start, stop) for _, _, start, stop in slots_in(binder.program, part)] if part is not None else []

    def scale_slots(gradient: torch.Tensor, factor: torch.Tensor) -> None:
        # between slots are zeros, which nothing writes again
        scale_each([gradient[start:stop] for start, stop in slots], factor)

    def scale(gradient: torch.Tensor, factor: torch.Tensor, **_: Any) -> torch.Tensor:
        make_deferred()
        if factor.device.type != "cpu":
            scale_slots(gradient, factor)  # to look at the factor would wait for the GPU
            return gradient
        number = factor.item()
        if not math.isfinite(number):
            scale_slots(gradient, factor)
            forget_writes(binder.pieces)
        elif number != 1.0 and not few.visit(gradient, scaling_by(number)):
            gradient.mul_(number)
        return gradient

    return scale


@binds(ops.clip_value)
def _bind_clip_value(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    if isinstance(binder.visitors.get((node.args[0], node)), BoundVisitor):
        return lambda gradient, **_: gradient  # bounded when it was made
    source: Any = node.args[0]
    if source.target is ops.wait and part_elements_of(source) is not None:
        return lambda share, *, max_value, **_: share.bounded(max_value)
    if not has_exclusive_memory(source):
        return lambda gradient, *, max_value, **_: torch.clamp(gradient, -max_value, max_value)
    few = binder.few_made(replica, source)

    def clip_value(gradient: torch.Tensor, *, max_value: float, **_: Any) -> torch.Tensor:
        bounding = bounding_by(max_value)
        if not few.visit(gradient, bounding):
            bounding(gradient)
        return gradient

    return clip_value


@binds(ops.update)
def _bind_update(binder: Binder, replica: int, node: fx.Node) -> Callable[..., None]:
    slots = binder.state.optimizers.slot_optimizer(bucket_of(node), replica)
    if slots is not None:
        return _by_slots(binder, replica, node, slots)
    optimizer = binder.state.optimizers.flat_optimizer(bucket_of(node), replica)
    part_elements: Any = node.kwargs.get("part_elements")
    if part_elements is not None:
        return _in_parts(binder, replica, optimizer, part_elements)
    make_deferred = making_deferred(binder, node.args[0])
    if scaling_factor(node) is None:

        def update_as_it_is(gradient: torch.Tensor, **_: Any) -> None:
            make_deferred()
            optimizer.update(gradient)

        return update_as_it_is
    scale, few = scaling(binder, replica, node), binder.few_made(replica, node.args[0])

    def update(gradient: torch.Tensor, factor: torch.Tensor, **_: Any) -> None:
        number = _usual(factor) if optimizer.divides_gradients else None
        if number is None:
            optimizer.update(scale(gradient, factor))
            return
        make_deferred()
        if few.visit(gradient, scaling_by(number)):
            optimizer.update(gradient)
        else:
            optimizer.update(gradient, 1.0 / number)

    return update


def _by_slots(binder: Binder, replica: int, node: fx.Node, optimizer: SlotOptimizer) -> Callable[..., None]:
    bucket = bucket_of(node)
    if scaling_factor(node) is None:
        return lambda gradient, **_: optimizer.update(gradient, binder.unused(bucket))
    scale = scaling(binder, replica, node)

    def update(gradient: torch.Tensor, factor: torch.Tensor, **_: Any) -> None:
        number = _usual(factor) if optimizer.divides_gradients else None
        if number is None:
            optimizer.update(scale(gradient, factor), binder.unused(bucket))
        else:
            optimizer.update(gradient, binder.unused(bucket), 1.0 / number)

    return update


def _in_parts(binder: Binder, replica: int, optimizer: FlatOptimizer, num_elements: int) -> Callable[..., None]:
    reserved, dtype = binder.state.reserved, optimizer.parameter.dtype

    def update(share: UnmadeShare, **_: Any) -> None:
        if largest := share.largest_part(num_elements):
            memory = reserved.block(replica, OF_PARTS, (largest,), dtype)
            optimizer.of_parts.update(functools.partial(share.make_parts, num_elements, memory))
        else:
            optimizer.update(share.make())

    return update


def _usual(factor: torch.Tensor) -> float | None:
    """A CPU factor as a number. None if it is 1, or if division by its inverse may change the result."""
    if factor.device.type != "cpu":
        return None
    number = factor.item()
    is_usual = number != 1.0 and _SMALLEST <= abs(number) <= 1 / _SMALLEST
    return number if is_usual else None


@binds(ops.accumulate)
def _bind_accumulate(binder: Binder, replica: int, node: fx.Node) -> Callable[..., None]:
    accumulated, bucket = _accumulated(binder), bucket_of(node)
    return lambda packed, **_: accumulated.add(bucket, replica, packed)


@binds(ops.add_accumulated)
def _bind_add_accumulated(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    accumulated, bucket = _accumulated(binder), bucket_of(node)
    packs = binder.program.buckets[bucket].packs
    elements = next((slice(pack.start, pack.stop) for pack in packs if pack.number == pack_of(node)), slice(None))

    def add_accumulated(packed: torch.Tensor, **_: Any) -> torch.Tensor:
        accumulated.add_to(bucket, replica, packed, elements)
        return packed

    return add_accumulated


def _accumulated(binder: Binder) -> AccumulatedGradients:
    assert not isinstance(binder.state, EvaluationState), "an evaluation has no gradients"
    return binder.state.accumulated


@binds(ops.add_to_grad)
def _bind_add_to_grad(binder: Binder, replica: int, node: fx.Node) -> Callable[..., None]:
    state, bucket = binder.state, bucket_of(node)
    assert isinstance(state, GradientState), "a program for gradients has their state"
    return lambda gradient, **_: state.add(bucket, gradient, binder.unused(bucket))
