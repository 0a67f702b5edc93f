"""Nets that are trained in turn, each by a loss that may read the others: by steps, or in a plain loop."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from twins import compiled_step

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Turns:
    """Without devices, a plain loop."""

    def __init__(
        self,
        nets: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        losses: Sequence[Loss],
        num_devices: int = 0,
        **options: Any,
    ) -> None:
        self.nets, self.optimizers, self.losses = nn.ModuleList(nets), [*optimizers], [*losses]
        self.steps = [
            compiled_step(net, loss, num_devices, optimizer, **options)
            for net, optimizer, loss in zip(nets, optimizers, losses, strict=True)
            if num_devices
        ]

    def train(self, turn: int, x: torch.Tensor) -> torch.Tensor:
        """The net whose turn it is makes a step; gives its loss."""
        if self.steps:
            return self.steps[turn](x, target=x)  # type: ignore[no-any-return]
        self.nets.zero_grad()
        loss = self.losses[turn](self.nets[turn](x), x)
        loss.backward()
        self.optimizers[turn].step()
        return loss.detach()

    def close(self) -> None:
        """Closes all steps."""
        for step in self.steps:
            step.close()


class Game(nn.Module):
    """The loss of a generator, or of its critic, which reads the other one."""

    def __init__(self, generator: nn.Module, critic: nn.Module, is_critics: bool) -> None:
        super().__init__()
        self.generator, self.critic, self.is_critics = generator, critic, is_critics

    def forward(self, noise: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        made = self.critic(self.generator(noise))
        return (made - self.critic(noise if real is None else real)).mean() if self.is_critics else -made.mean()
