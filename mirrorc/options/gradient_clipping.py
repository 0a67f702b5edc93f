"""Options for gradient clipping, and their checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted
from mirrorc.pipeline.protocol import Pass
from mirrorc.user.optimizer_groups import OptimizerGroups


@dataclass(frozen=True)
class ClipGradNorm:
    """A bound on the norm of gradients, with the arguments of `torch.nn.utils.clip_grad_norm_`.

    Attributes:
        max_norm: the largest norm; math.inf only measures it, for `Step.grad_norm`.
        norm_type: the p of the p-norm, a positive number; math.inf for the largest absolute value.

    Raises:
        TypeError: an attribute is not a number.
        ValueError: an attribute is negative, or ``norm_type`` is 0.
    """

    max_norm: float
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        _check("max_norm", self.max_norm)
        _check("norm_type", self.norm_type)
        if self.norm_type == 0:
            raise ValueError(
                "MC1002: norm_type is 0: give a positive number, or math.inf for the largest absolute value"
            )


def _check(name: str, value: Any) -> None:
    if isinstance(value, bool | torch.Tensor) or not isinstance(value, Real):
        raise TypeError(f"MC1001: {name} is {value!r}: give a number, such as 1.0")
    if not float(value) >= 0:
        raise ValueError(f"MC1002: {name} is {value!r}: give a number that is not negative")


ClipNorms = float | ClipGradNorm | Sequence[float | ClipGradNorm | None] | None
"""A bound for all gradients together; or, for each group of the optimizers, a bound or None; or None."""


def clipping(clip_grad_norm: Any, clip_grad_value: Any, groups: OptimizerGroups) -> dict[str, Any]:
    """Arguments of `mirrorc.passes.default_pipeline` for clipping."""
    if clip_grad_value is not None:
        _check("clip_grad_value", clip_grad_value)
    arguments: dict[str, Any] = {"max_grad_value": None if clip_grad_value is None else float(clip_grad_value)}
    if isinstance(clip_grad_norm, Sequence) and not isinstance(clip_grad_norm, str | bytes):
        bounds = [_bound(value) for value in clip_grad_norm]
        if len(bounds) != len(groups):
            who = "optimizers have" if len(groups.optimizers) > 1 else "optimizer has"
            raise problem(
                ValueError,
                f"MC1504: clip_grad_norm is {clip_grad_norm!r}, but the {who} {counted(len(groups), 'group')}",
                fix=(
                    "clip_grad_norm=1.0, one number for all gradients together",
                    "clip_grad_norm=(1.0, None), a number or None for each group",
                ),
            )
        arguments["max_grad_norm"] = tuple(None if bound is None else float(bound.max_norm) for bound in bounds)
        arguments["grad_norm_type"] = tuple(2.0 if bound is None else float(bound.norm_type) for bound in bounds)
    elif (bound := _bound(clip_grad_norm)) is not None:
        arguments |= {"max_grad_norm": float(bound.max_norm), "grad_norm_type": float(bound.norm_type)}
    return arguments


def check_bounds_of_groups(pipeline: Sequence[Pass], groups: OptimizerGroups) -> None:
    """Refuses bounds per group if the number of groups has changed."""
    bounds = next((getattr(entry, "max_norm", None) for entry in pipeline if entry.name == "clip-gradients"), None)
    if isinstance(bounds, tuple) and len(bounds) != len(groups):
        who = "optimizers have" if len(groups.optimizers) > 1 else "optimizer has"
        raise problem(
            ValueError,
            f"MC1504: clip_grad_norm has {counted(len(bounds), 'bound')}, but the {who} {counted(len(groups), 'group')} now",
            "it has one bound for each group",
            (
                "mirrorc.compile(..., clip_grad_norm=(1.0, None)), anew, with a number or None for each group",
                "clip_grad_norm=1.0, one number for all gradients together",
            ),
        )


def _bound(value: Any) -> ClipGradNorm | None:
    if value is None or isinstance(value, ClipGradNorm):
        return value
    try:
        return ClipGradNorm(value)
    except (TypeError, ValueError) as error:
        raise problem(
            type(error),
            f"MC1002: clip_grad_norm is {value!r}",
            fix="give a number from 0, mirrorc.ClipGradNorm(max_norm, norm_type), or a sequence of these for the groups of the "
            "optimizer",
        ) from None


def measured_norms(measured: dict[str, torch.Tensor], program: Program, num_groups: int, *, is_skipped: bool) -> Any:
    """The value of `Step.grad_norm`: a norm, or a tuple with one per group; None if none is measured.

    ``measured`` is from the last step that was not skipped. The norm of a skipped step is NaN.
    """
    if is_skipped:
        device = program.devices[0].torch_device
        types = {
            str(node.kwargs["what"]): node.all_input_nodes[0].meta["val"]
            for graph in program.graphs()
            for node in calls_to(graph, ops.tell)
        }
        measured = {
            name: torch.full(val.shape, math.nan, dtype=val.dtype, device=device) for name, val in types.items()
        }
    if "grad_norm" in measured:
        return measured["grad_norm"].clone()
    norms = [measured.get(f"grad_norm_{group}") for group in range(num_groups)]
    return (
        tuple(None if norm is None else norm.clone() for norm in norms) if any(n is not None for n in norms) else None
    )
