"""A model and its loss as one module, for the tracer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from mirrorc.capture.arguments import Structure, paths_of_containers, rebuild_call


class TrainingCall(nn.Module):
    """A module whose forward computes the loss from a flat list of tensors, for the tracer.

    Attributes:
        plain: what takes the places of plain values in the structure (`mirrorc.capture.arguments.Call.plain`). It may be
            replaced by that of another call, to ask guards whether a trace would then read the same.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        structure: Structure,
        plain: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.structure = structure
        self.plain = plain or {}
        self.training = model.training  # modes of the model's own modules stay as the user set them

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        args, kwargs = rebuild_call(self.structure, leaves, self.plain)
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

    def containers(self) -> list[str]:
        """The names of the containers among the arguments, in the order in which forward puts them together."""
        parameters = inspect.signature(self.model.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return paths_of_containers(self.structure, names)
