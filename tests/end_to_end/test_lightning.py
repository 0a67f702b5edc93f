"""LightningModules in a loop of the user's own, without a Trainer; with the real package, where it is installed."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from twins import Twins

lightning = pytest.importorskip("lightning", reason="needs the package lightning")


class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, forward_logs: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x)
        if self.hparams.forward_logs:
            self.log("mean", y.mean(), prog_bar=True)
            self.log_dict({"least": y.min(), "most": y.max()})
        return y

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"twice": 2 * loss})
        return loss


class Losses(nn.Module):
    def __init__(self, module: Classifier) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.module.training_step((x, y), 0)


CASES: dict[str, tuple[Callable[[], nn.Module], Any, int]] = {
    "outputs": (Classifier, F.cross_entropy, 0),
    "a forward that logs": (lambda: Classifier(forward_logs=True), F.cross_entropy, 3),
    "the loss of its training step": (lambda: Losses(Classifier()), None, 2),
}
"""What makes the model, its loss, and how many values it logs, of each of which Lightning warns that there is no Trainer."""


@pytest.mark.fast
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_in_a_plain_loop_and_lightning_warns_once_of_each_value(name: str) -> None:
    make, loss_fn, num_values = CASES[name]
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    batches = [(torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,))) for _ in range(4)]
    second = "target" if loss_fn is not None else "y"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Twins(make().double(), sgd, loss_fn, tolerance=1e-12) as pair:
            losses = [pair.step(x, **{second: y}).item() for x, y in batches]
            assert "1 compiled program" in repr(pair.step)
            assert "capture='autograd'" not in pair.step.program.to_text()
    told = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    assert len(told) == num_values and all("`self.trainer` reference is not registered" in one for one in told)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = [pair.plain(x, **{second: y}).item() for x, y in batches]
    assert losses == pytest.approx(expected, rel=1e-12)
    pair.check()
