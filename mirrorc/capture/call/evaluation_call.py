"""A model and its loss as one module, traced for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mirrorc.capture.call.call_arguments import Structure
from mirrorc.capture.call.training_call import TrainingCall, beside_loss, loss_in


class EvaluationCall(TrainingCall):
    """A forward that returns loss and outputs, traced without gradients.

    A missing loss is an empty tensor. Without a loss, outputs are always returned; otherwise outputs that are not
    requested are None.
    """

    trains = False

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        structure: Structure,
        plain: Mapping[str, Any] | None = None,
        *,
        keeps_outputs: bool = False,
    ) -> None:
        super().__init__(model, loss_fn, structure, plain, keeps_outputs=True)  # forward returns a pair in any case
        self._wants_outputs = keeps_outputs
        self.needs_loss = loss_fn is not None and any(name == "target" for name, _ in structure[1])

    def results(self, leaves: Sequence[torch.Tensor]) -> Any:
        args, kwargs = self.rebuilt(self.structure, leaves, self.plain)
        target = kwargs.pop("target") if self.needs_loss else None
        outputs = self.model(*args, **kwargs)
        loss = None
        if self.needs_loss:
            result = self.loss_fn(outputs, target)  # type: ignore[misc]
            if not isinstance(result, torch.Tensor):
                outputs = (outputs, beside_loss(result))
            loss = loss_in(result)
        elif self.loss_fn is None:
            loss = loss_in(outputs)
            if isinstance(loss, torch.Tensor) and loss.dim() > 0 and loss.numel() != 1:
                loss = None
        if not isinstance(loss, torch.Tensor):
            return torch.empty(0), outputs
        return loss, outputs if self._wants_outputs else None
