"""Functions of nodes that leave gradients to the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of
from mirrorc.runtime.execution.binding.binder import Binder, binds
from mirrorc.runtime.state.gradient_state import GradientState


@binds(ops.add_to_grad)
def _bind_add_to_grad(binder: Binder, replica: int, node: fx.Node) -> Callable[..., None]:
    state, bucket = binder.state, bucket_of(node)
    assert isinstance(state, GradientState), "a program for gradients has their state"

    def add_to_grad(gradient: torch.Tensor, **_: Any) -> None:
        state.add(bucket, gradient, binder.unused(bucket))

    return add_to_grad
