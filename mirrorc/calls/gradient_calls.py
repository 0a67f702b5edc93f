"""Refusals of calls for gradients: options, gradients that cannot be added to, and updates without an optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import problem
from mirrorc.options.step_options import StepOptions
from mirrorc.passes import CheckFinite, ClipGradients

_REFUSED = {
    "clip_grad_norm= or clip_grad_value=": (
        "what p.grad has already would have to be clipped together with the new gradients",
        "torch.nn.utils.clip_grad_norm_ or clip_grad_value_ after the call, in place of the option",
    ),
    "scaler=": (
        "a step scales the loss and its own gradients, and these are yours",
        "mirrorc.compile(..., autocast=torch.bfloat16), without scaler=",
    ),
    "check_finite='skip'": (
        "the update is yours, and only you can skip it",
        "check_finite=True, which raises an error and changes nothing",
    ),
    "cuda_graphs=True": ("a graph replays whole steps", "compiler=mirrorc.Compiler(cuda_graphs=False)"),
}


def refuse_gradients(options: StepOptions) -> None:
    """Raises `ExecutionError` if an option would have no effect, because gradients are left to the user."""
    passes = options.pipeline
    present = {
        "clip_grad_norm= or clip_grad_value=": any(isinstance(entry, ClipGradients) for entry in passes),
        "scaler=": options.scaler is not None,
        "check_finite='skip'": any(isinstance(entry, CheckFinite) and entry.otherwise == "skip" for entry in passes),
        "cuda_graphs=True": options.cuda_graphs,
    }
    for option, (why, fix) in _REFUSED.items():
        if present[option]:
            raise problem(ExecutionError, f"MC1003: step.gradients() cannot be used with {option}", why, fix)


def refuse_odd_gradients(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `ExecutionError` if a parameter has a gradient that torch cannot add to. Adding would fail half-way."""
    for name, tensor in tensors.items():
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is None or gradient.layout is not torch.strided:
            continue
        overlaps = any(size > 1 and stride == 0 for size, stride in zip(gradient.shape, gradient.stride(), strict=True))
        if overlaps or gradient.is_inference():
            raise problem(
                ExecutionError,
                f"MC3209: nothing can be added to the gradient of parameter {name!r}",
                "its elements share memory" if overlaps else "it was made in inference mode",
                ("p.grad = None", "p.grad = p.grad.clone()"),
            )


def refuse_update(options: StepOptions) -> None:
    """Raises `ValueError` if there is no optimizer."""
    if not options.optimizers.optimizers:
        fix = (
            "optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)",
            "step.gradients(x, y), which leaves the gradients in p.grad for an optimizer of your own",
        )
        raise problem(ValueError, "MC1211: optimizer is missing: mirrorc.compile got none, and a step updates", fix=fix)
