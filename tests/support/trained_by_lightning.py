"""An image classifier of Lightning, with automatic and with manual optimization, by its Trainer and by Fabric.

Under torchrun, ``python trained_by_lightning.py FOLDER`` trains on both workers, and the first saves the values.
"""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mirrorc
from mirrorc.integrations.lightning import MirrorcFabricStrategy, MirrorcStrategy

OPTIONS: dict[str, Any] = {"compiler": mirrorc.Compiler(backend="eager"), "debug": mirrorc.Debug(progress=False)}
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
NUM_WORKERS = int(os.environ.get("WORLD_SIZE", 1))


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
        self.register_buffer("importance", torch.linspace(1, 2, 10))
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Weighted(Classifier):
    """A loss that no mean over shards gives."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, self.importance)


class Manual(Classifier):
    """Two updates a batch, by a submodule."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        x, y = batch
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.net(x), y))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()


class Outside(Classifier):
    """A parameter that is used outside of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x) * self.temperature, y)


class OutsideByArgument(Outside):
    """A parameter that reaches a forward by its argument."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x * self.temperature), y)


def loader(batch_size: int, dtype: torch.dtype = torch.float64, order: str = "in turn") -> DataLoader[Any]:
    """Batches in turn, ``shuffled``, or in the order that Lightning gives to workers, ``of workers``, in one process."""
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data[:48] / 16, dtype=dtype), torch.tensor(digits.target[:48]))
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0) if order == "of workers" else None
    return DataLoader(dataset, batch_size, shuffle=order == "shuffled", sampler=sampler)


def trained(
    model: Classifier, folder: Path, order: str = "in turn", checkpoint: Any = None, **options: Any
) -> L.Trainer:
    options = {"max_epochs": 2, "precision": "64-true", **QUIET, **options}
    if model.automatic_optimization:
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **options}
    dtype = torch.float64 if options["precision"] == "64-true" else torch.float32
    torch.manual_seed(1)
    trainer = L.Trainer(accelerator="cpu", default_root_dir=folder, **options)
    trainer.fit(model, loader(12 // NUM_WORKERS, dtype, order), loader(7, dtype), ckpt_path=checkpoint)
    return trainer


def trained_by_fabric(penalty: float = 0.0, **options: Any) -> dict[str, torch.Tensor]:
    """The values at the end, of a loss with a penalty on a weight."""
    fabric = L.Fabric(accelerator="cpu", precision="64-true", **options)
    fabric.launch()
    classifier = Classifier()
    model, optimizer = fabric.setup(classifier.net, torch.optim.AdamW(classifier.net.parameters(), lr=0.02))
    batches = fabric.setup_dataloaders(loader(12 // NUM_WORKERS))
    for index, (x, y) in enumerate(batches):
        is_last = index % 2 == 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = F.cross_entropy(model(x), y) / 2
            fabric.backward(loss + penalty * classifier.net[0].weight.square().sum() if penalty else loss)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.state_dict())


def main(folder: Path) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    values: dict[str, Any] = {}
    for kind in (Classifier, Manual):
        model = kind()
        trainer = trained(model, folder, strategy=MirrorcStrategy(**OPTIONS), devices=2)
        values[kind.__name__] = (dict(model.state_dict()), trainer.global_step, dict(trainer.callback_metrics))
    values["Fabric"] = trained_by_fabric(strategy=MirrorcFabricStrategy(**OPTIONS), devices=2)
    for kind in (Outside, OutsideByArgument):
        try:
            trained(kind(), folder, strategy=MirrorcStrategy(**OPTIONS), devices=2)
        except mirrorc.errors.ExecutionError as error:
            values[kind.__name__] = str(error)
    try:
        trained_by_fabric(penalty=0.1, strategy=MirrorcFabricStrategy(**OPTIONS), devices=2)
    except mirrorc.errors.ExecutionError as error:
        values["Fabric with a penalty"] = str(error)
    if trainer.is_global_zero:
        torch.save(values, folder / "values.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
