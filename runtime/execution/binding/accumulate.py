"""Nodes that accumulate gradients over calls, or leave them to the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, pack_of
from mirrorc.runtime.execution.binding.binder import Binder, binds
from mirrorc.runtime.state.evaluation_state import EvaluationState
from mirrorc.runtime.state.gradient_state import GradientState
from mirrorc.runtime.state.gradients.accumulated_gradients import AccumulatedGradients


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
