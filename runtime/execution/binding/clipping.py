"""Nodes that measure and scale gradients, in place if no other node reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.buckets.bucket_parts import slots_in
from mirrorc.analysis.buckets.rescaling import has_exclusive_memory
from mirrorc.analysis.gradients.tiled_updates import part_elements_of
from mirrorc.ir import ops
from mirrorc.ir.value_types import value_type
from mirrorc.runtime.execution.binding.binder import Binder, binds
from mirrorc.runtime.execution.commit.part_visitors import BoundVisitor, NormVisitor, norm_of, norms_of_all
from mirrorc.runtime.state.shares.deferred_tables import DeferredTables
from mirrorc.runtime.state.shares.pieces import bounding_by, forget_writes, scaling_by
from mirrorc.runtime.state.step_state import StepState
from mirrorc.torch_internals import scale_each

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


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

    def scale_slots(
        gradient: torch.Tensor, factor: torch.Tensor
    ) -> None:  # between slots are zeros, which nothing writes again
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
