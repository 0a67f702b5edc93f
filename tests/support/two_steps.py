"""Two steps that workers train in turn, in blocks for data that ends early; for processes of `outcomes`."""

import os
import signal
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mirrorc
from mirrorc.options.table import grouped

LONG = 600.0  # seconds; longer than the tests wait


def _step(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"backend": "eager", "capture": "dynamo", "timeout": LONG}
    return mirrorc.compile(model, 1, optimizer=optimizer, loss_fn=functional.mse_loss, **grouped({**given, **options}))


class Judge(nn.Module):
    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fake = self.generator(noise)
        return (
            functional.softplus(-self.discriminator(real)).mean() + functional.softplus(self.discriminator(fake)).mean()
        )


class Forger(Judge):
    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return functional.softplus(-self.discriminator(self.generator(noise))).mean()


NUM_BATCHES = (4, 2)  # of each worker


def adversaries() -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer]]:
    """A generator and a discriminator with an optimizer for each, that of the discriminator first."""
    torch.manual_seed(0)
    generator, discriminator = (
        nn.Linear(2, 3).double(),
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
    )
    optimizers = [
        torch.optim.SGD(discriminator.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(generator.parameters(), lr=0.05),
    ]
    return generator, discriminator, optimizers


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    stream = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(2 + rank, 3, generator=stream).double(), torch.randn(2 + rank, 2, generator=stream).double())
        for _ in range(NUM_BATCHES[rank])
    ]


def train_adversaries(rank: int) -> dict[str, Any]:
    """Trains both as one of two workers, of which the second has fewer batches, the generator twice for each batch."""
    generator, discriminator, optimizers = adversaries()
    given = {"backend": "eager", "capture": "dynamo", "timeout": LONG}
    with (
        mirrorc.compile(Judge(generator, discriminator), 1, optimizer=optimizers[0], **grouped(given)) as d_step,
        mirrorc.compile(Forger(generator, discriminator), 1, optimizer=optimizers[1], **grouped(given)) as g_step,
        mirrorc.join(d_step, g_step),
    ):
        for real, noise in batches(rank):
            d_step(real, noise)
            g_step(noise)
            g_step(noise)
    return {"weights": [p.tolist() for p in (*discriminator.parameters(), *generator.parameters())]}


def adversaries_on_one_device() -> list[list[float]]:
    """What the same training gives in plain PyTorch, on the batches of both workers."""
    generator, discriminator, optimizers = adversaries()
    losses = Judge(generator, discriminator), Forger(generator, discriminator)
    each = [batches(rank) for rank in range(len(NUM_BATCHES))]
    for number in range(max(NUM_BATCHES)):
        real, noise = (
            torch.cat(parts) for parts in zip(*(own[number] for own in each if number < len(own)), strict=True)
        )
        for which, given in ((0, (real, noise)), (1, (noise,)), (1, (noise,))):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses[which](*given).backward()
            optimizers[which].step()
    return [p.tolist() for p in (*discriminator.parameters(), *generator.parameters())]


def train_two(rank: int, how: str) -> dict[str, Any]:
    """Trains as one of two workers, of which the second has fewer batches.

    In one block, ``"together"``, a generator and a discriminator are trained; each worker calls an ``"other"`` step; the data of
    one is ``"gone"``, or it is ``"killed"``. There are ``"nested"`` blocks; a call ``"within"`` the other step's block, or one
    that ``"gathers"`` there; blocks ``"in turn"``; or a worker that has ``"closed"`` its step before the other one's first call.
    """
    if how == "together":
        return train_adversaries(rank)
    torch.manual_seed(rank)
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    x, y = torch.full((2, 3), rank + 1.0), torch.ones(2, 2)
    found: dict[str, Any] = {}
    options = {"shard_optimizer": True} if how == "gathers" else {}
    with _step(models[0]) as one, _step(models[1], **options) as two:
        try:
            if how == "closed":
                two.prepare(x, target=y)
                if rank == 1:
                    two.close()
                else:
                    two(x, target=y)
            elif how == "other":
                with mirrorc.join(one, two):
                    (one, two)[rank](x, target=y)
            elif how in ("gone", "killed"):
                with mirrorc.join(one, two):
                    for number in range(2 + rank):
                        one(x, target=y)
                        if number == 2 and how == "killed":
                            os.kill(os.getpid(), signal.SIGKILL)
                        if number == 2:
                            raise mirrorc.MirrorcError("the data is gone")
                        two(x, target=y)
            elif how == "nested":
                with one.join(), two.join():
                    one(x, target=y)
            elif how == "gathers":
                with one.join():
                    two.gather_optimizer_state()
            elif how == "within":
                with one.join():
                    for _ in range(2 - rank):
                        one(x, target=y)
                        two(x, target=y)
        except mirrorc.MirrorcError as error:
            found["refused"] = f"{type(error).__name__}: {error}"
        if how not in ("closed", "killed"):  # a block that was refused leaves no trace
            for step in (one, two):
                with step.join():
                    for _ in range(3 - rank):
                        step(x, target=y)
    return {**found, "weights": [model.weight.tolist() for model in models]}
