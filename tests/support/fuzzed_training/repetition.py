"""A second step of mirrorc that does the same as the first, whose bits it must give."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

import mirrorc


class Repetition:
    """Trains the other side with mirrorc, by a step that was compiled as the one that it repeats."""

    def __init__(self, step: mirrorc.Step) -> None:
        self._step = step

    def step(self, batch: Mapping[str, Any], loss_fn: Callable[..., torch.Tensor]) -> float:
        return self._step(**batch).item()

    def accumulate(self, batch: Mapping[str, Any], loss_fn: Callable[..., torch.Tensor]) -> float:
        return self._step.accumulate(**batch).item()

    def gradients(self, batch: Mapping[str, Any], loss_fn: Callable[..., torch.Tensor]) -> float:
        return self._step.gradients(**batch).item()

    def evaluate(self, batch: Mapping[str, Any], loss_fn: Callable[..., torch.Tensor]) -> float:
        return self._step.evaluate(**batch).item()

    @property
    def num_accumulated(self) -> int:
        return self._step.num_accumulated

    @property
    def grad_norm(self) -> float:
        norm: float = self._step.grad_norm
        return norm

    def kept(self) -> Collection[nn.Parameter]:
        return ()

    def drop(self, parameters: Collection[nn.Parameter]) -> None:
        pass

    def drop_all(self) -> None:
        self._step.zero_grad()

    def close(self) -> None:
        self._step.close()
