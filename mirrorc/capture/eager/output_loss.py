"""The loss of a run without one, from which backward begins with the gradients of outputs that the caller's loss gives."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from mirrorc.capture.diagnostics.capture_errors import NoGradientError, complex_output
from mirrorc.capture.eager.eager_run import Run
from mirrorc.capture.eager.run_outputs import RunOutputs


def loss_of_outputs(run: Run, outputs: RunOutputs, model_name: str) -> torch.Tensor:
    """A scalar whose gradient is that of the sum of outputs times ``run.tangents``; in a first run these are ones.

    Raises:
        NoGradientError: no output needs a gradient.
        CaptureError: one that needs it is complex.
    """
    names = outputs.differentiable
    values = [outputs.attached[name] for name in names]
    if not values:
        raise NoGradientError(f"no output of {model_name} needs a gradient")
    if (name := next((name for name in names if outputs.attached[name].is_complex()), None)) is not None:
        raise complex_output(name, model_name)
    with torch.enable_grad():
        loss: torch.Tensor = _OutputLoss.apply(run, names, *values)
    return loss


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, names: Sequence[str], *values: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.ones = {name: value.new_ones(()).expand(value.shape) for name, value in zip(names, values, strict=True)}
        dtype = functools.reduce(torch.promote_types, (value.dtype for value in values))
        return values[0].new_zeros((), dtype=dtype)

    @staticmethod
    def backward(ctx: Any, weight: torch.Tensor) -> tuple[Any, ...]:
        tangents = ctx.run.tangents if ctx.run.tangents is not None else ctx.ones
        weights = {name: weight.to(one.dtype) for name, one in ctx.ones.items()}
        return None, None, *(tangents[name] * weights[name] if name in tangents else None for name in ctx.ones)
