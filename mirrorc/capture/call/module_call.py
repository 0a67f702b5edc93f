"""A model without a loss, for a loop that computes its loss from the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from mirrorc.capture.call.evaluation_call import EvaluationCall
from mirrorc.capture.call.training_call import TrainingCall


class ModuleCall(TrainingCall):
    """A forward that returns outputs. Backward begins with their gradients: its loss is the sum of outputs times
    tangents.
    """

    takes_tangents = True

    def results(self, leaves: Sequence[torch.Tensor]) -> Any:
        return _outputs_alone(self, leaves)


class ModuleEvaluation(EvaluationCall):
    """A forward that returns outputs, traced without gradients."""

    def results(self, leaves: Sequence[torch.Tensor]) -> Any:
        return _outputs_alone(self, leaves)


def _outputs_alone(call: TrainingCall, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
    args, kwargs = call.rebuilt(call.structure, leaves, call.plain)
    model: nn.Module = call.model
    return torch.empty(0), model(*args, **kwargs)
