"""Assumptions of a graph with symbolic sizes: guards for each new size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mirrorc.torch_internals.symbols.symbolic_sizes import has_symbols, num_elements_now


def knowledge_of(tensor: Any) -> tuple[Any, tuple[int, int]]:
    """The environment of a fake tensor's symbols, and a version of its guards and facts."""
    environment = tensor.fake_mode.shape_env
    return environment, (len(environment.guards), len(environment.replacements))


def assume_num_elements(tensors: Sequence[torch.Tensor], *, least: float = 0, most: float = math.inf) -> None:
    """Guards the present outcome of each bound on the total number of elements."""
    symbolic = [tensor for tensor in tensors if has_symbols(tensor)]
    rest = sum(num_elements_now(tensor) for tensor in tensors if not has_symbols(tensor))
    if symbolic:
        count: Any = rest + sum(math.prod(tensor.shape) for tensor in symbolic)
        for holds in (count >= math.floor(least), most == math.inf or count <= math.floor(most)):
            bool(holds)  # adds a guard, unless it is known
