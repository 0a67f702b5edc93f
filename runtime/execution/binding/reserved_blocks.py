"""Nodes that reserve persistent memory for regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.runtime.execution.binding.binder import Binder, binds


@binds(ops.reserved)
def _bind_reserved(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    number, shape, dtype = (node.kwargs[key] for key in ("number", "shape", "dtype"))
    memory = binder.state.reserved  # asked in each step: other programs may have made a block larger
    details: tuple[Any, ...] = number, shape, dtype
    return lambda **_: memory.block(replica, *details)
