"""A second step of mirrorc that does the same as the first, whose bits it must give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

import mirrorc


class Repetition:
    """Trains the other side with mirrorc.

    Args:
        step: compiled as the one that it repeats.
    """

    def __init__(self, step: mirrorc.Step) -> None:
        self._step = step

    def step(self, batch: Mapping[str, Any], loss_fn: Callable[..., torch.Tensor]) -> float:
        """Trains on one batch; returns its loss."""
        return self._step(**batch).item()

    def close(self) -> None:
        """Ends the step."""
        self._step.close()
