"""A model and its loss as one module, for the tracer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mirrorc.capture.arguments import Structure, rebuild_call


class TrainingCall(nn.Module):
    """A module whose forward computes the loss from a flat list of tensors, for the tracer."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, structure: Structure) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.structure = structure
        self.training = model.training  # modes of the model's own modules stay as the user set them

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        args, kwargs = rebuild_call(self.structure, leaves)
        if self.loss_fn is not None:
            target = kwargs.pop("target")
            loss = self.loss_fn(self.model(*args, **kwargs), target)
        else:
            output = self.model(*args, **kwargs)
            if isinstance(output, torch.Tensor):
                loss = output
            else:
                loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        return loss if isinstance(loss, torch.Tensor) else torch.empty(0)  # empty: there is no loss, see _check_loss
