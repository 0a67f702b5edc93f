"""Nodes that update parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.buckets.rescaling import scaling_factor
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of
from mirrorc.runtime.execution.binding.binder import Binder, binds
from mirrorc.runtime.execution.binding.clipping import making_deferred, scaling
from mirrorc.runtime.state.optimizers.flat_optimizer import FlatOptimizer
from mirrorc.runtime.state.optimizers.slot_optimizer import SlotOptimizer
from mirrorc.runtime.state.shares.gradient_shares import UnmadeShare
from mirrorc.runtime.state.shares.pieces import scaling_by
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
            optimizer.update_divided(gradient, 1.0 / number)

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
