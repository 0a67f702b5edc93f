"""The loss that a training call returns."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from mirrorc.messages.problem import message
from mirrorc.messages.source_lines import users_stack_level
from mirrorc.torch_internals import no_torch_function


class TrainedLoss(torch.Tensor):
    """A loss whose backward the step has already run: ``loss.backward()`` only warns.

    Products and quotients with a number, as for accumulation in libraries, are a `TrainedLoss`, too. All other results,
    copies and saved values are plain tensors.
    """

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        if self.requires_grad:  # something was added in place
            super().backward(*args, **kwargs)
            return
        warnings.warn(
            message(
                "MC3201: loss.backward() did nothing",
                "the call that returned it has run backward by itself",
                "leave loss.backward() out",
            ),
            stacklevel=users_stack_level(),
        )

    def __mul__(self, factor: Any) -> torch.Tensor:
        return _kept(self.as_subclass(torch.Tensor) * factor, factor)

    def __truediv__(self, divisor: Any) -> torch.Tensor:
        return _kept(self.as_subclass(torch.Tensor) / divisor, divisor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.as_subclass(torch.Tensor))

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(torch.Tensor), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).__deepcopy__(memo)


def _kept(scaled: torch.Tensor, factor: Any) -> torch.Tensor:
    return scaled.as_subclass(TrainedLoss) if isinstance(factor, int | float) else scaled
