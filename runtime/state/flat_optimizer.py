"""Runs the user's optimizer over flat memory: one bucket of one replica, or a share of it."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mirrorc.optimizers import SCALAR_STATE, is_fused
from mirrorc.torch_internals import bare_step, dividing_gradients, peak_allocation, takes_divisor

_TRIED_ELEMENTS = 4096  # enough that tensors of one element are negligible


@dataclass(frozen=True)
class UpdateMemory:
    """The memory that an element-wise update needs besides parameters and gradients.

    Attributes:
        state: dtypes of the state's tensors, by entry: as long as the bucket.
        scalars: dtypes of its entries that are one number, by entry.
        temporary_bytes: bytes for each element that an update takes and gives back.
    """

    state: Mapping[str, torch.dtype]
    scalars: Mapping[str, torch.dtype]
    temporary_bytes: float


class FlatOptimizer:
    """An optimizer of the user's class over one bucket of one replica, which it sees as a single parameter.

    Args:
        optimizer: the user's, which is read only.
        group: index of its parameter group whose hyperparameters apply.
        flat: the bucket's parameters, or a share of them, 1-D.
        rate: holds the learning rate, in place of the group's; None to take the group's.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: int, flat: torch.Tensor, rate: torch.Tensor | None = None
    ) -> None:
        self.parameter = torch.nn.Parameter(flat)
        self.parameter.requires_grad_(True)
        self._source = optimizer
        self._group = group
        self._rate = rate
        self.optimizer = object.__new__(type(optimizer))
        state = {
            "defaults": dict(optimizer.defaults),
            "state": defaultdict(dict),
            "param_groups": [self._hyperparameters()],
        }
        self.optimizer.__setstate__(state)  # as unpickling does; this is how the class starts from a given state
        self._step = bare_step(type(optimizer))

    def _hyperparameters(self) -> dict[str, Any]:
        """The user's present hyperparameters; if they leave the implementation open, the fused one is chosen."""
        group = {**self._source.param_groups[self._group], "params": [self.parameter]}
        if group.get("fused", False) is None and not group.get("foreach"):
            group["fused"] = is_fused(group, self.parameter.dtype, self.parameter.device.type)
        if self._rate is not None:
            group["lr"] = self._rate
        return group

    def sync(self) -> None:
        """Takes over hyperparameters that the user, or a scheduler, changed."""
        self.optimizer.param_groups[0].update(self._hyperparameters())

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state[self.parameter]

    def make_state(self) -> None:
        """Makes the state that its class makes in the constructor, as Adagrad does in torch 2.11, and others in their first step.

        This is for trials: in training, such state comes from the user's optimizer.
        """
        kind = type(self._source)
        taken = inspect.signature(kind).parameters
        group = {
            key: value for key, value in self.optimizer.param_groups[0].items() if key in taken and key != "params"
        }
        made = kind([self.parameter], **group).state
        if self.parameter in made:
            self.optimizer.state[self.parameter] = made[self.parameter]

    @property
    def divides_gradients(self) -> bool:
        """Whether `update_divided` can divide a gradient: a fused kernel of torch's runs now, on numbers of 32 bits."""
        is_fused = bool(self.optimizer.param_groups[0].get("fused"))
        return is_fused and self.parameter.dtype == torch.float32 and takes_divisor(type(self.optimizer))

    def update(self, gradient: torch.Tensor) -> None:
        """One step. Gradients are switched off in the caller's thread."""
        self.parameter.grad = gradient
        self._step(self.optimizer)

    def update_divided(self, gradient: torch.Tensor, divisor: float) -> None:
        """As `update`, with a gradient that the kernel divides when it reads it; it may write the quotient into its memory."""
        self.parameter.grad = gradient
        with dividing_gradients(self.optimizer, divisor):
            self._step(self.optimizer)


def update_memory(
    optimizer: torch.optim.Optimizer,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    known_state: Mapping[str, Any],
) -> UpdateMemory:
    """Measures the memory that an element-wise update needs, by stepping a copy of the optimizer on a few elements.

    Args:
        optimizer: the user's.
        group: index of its parameter group.
        dtype: of the parameters.
        device: of the parameters.
        known_state: entries of state that a parameter has already; empty if none.
    """
    flat, gradient = (torch.zeros(_TRIED_ELEMENTS, dtype=dtype, device=device) for _ in range(2))
    tried = FlatOptimizer(optimizer, group, flat)
    tried.make_state()
    with torch.no_grad():
        tried.update(gradient)  # makes its state
        made = [value for value in tried.state.values() if isinstance(value, torch.Tensor)]
        peak = peak_allocation(lambda: tried.update(gradient), [flat, gradient, *made])
    state = known_state or tried.state
    entries = {key: value.dtype for key, value in state.items() if isinstance(value, torch.Tensor)}
    return UpdateMemory(
        state={key: dtype for key, dtype in entries.items() if key not in SCALAR_STATE},
        scalars={key: dtype for key, dtype in entries.items() if key in SCALAR_STATE},
        temporary_bytes=peak / _TRIED_ELEMENTS,
    )
