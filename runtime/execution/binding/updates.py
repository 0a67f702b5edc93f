"""Nodes that update parameters, accumulate gradients over calls, or leave them to the user."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.buckets.rescaling import scaling_factor
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, pack_of
from mirrorc.runtime.execution.binding.binder import Binder, binds
from mirrorc.runtime.execution.binding.clipping import making_deferred, scaling
from mirrorc.runtime.state.evaluation_state import EvaluationState
from mirrorc.runtime.state.gradient_state import GradientState
from mirrorc.runtime.state.gradients.accumulated_gradients import AccumulatedGradients
from mirrorc.runtime.state.optimizers.flat_optimizer import FlatOptimizer, SlotOptimizer
from mirrorc.runtime.state.shares.pieces import UnmadeShare, scaling_by
from mirrorc.runtime.state.variables.reserved_memory import OF_PARTS

_SMALLEST = torch.finfo(torch.float32).tiny  # what is smaller has no inverse


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


def _in_parts(
    binder: Binder, replica: int, optimizer: FlatOptimizer, num_elements: int
) -> Callable[[UnmadeShare], None]:
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

    def accumulate(packed: torch.Tensor, **_: Any) -> None:
        accumulated.add(bucket, replica, packed)

    return accumulate


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

    def add_to_grad(gradient: torch.Tensor, **_: Any) -> None:
        state.add(bucket, gradient, binder.unused(bucket))

    return add_to_grad
