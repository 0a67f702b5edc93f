"""The Trainer of Hugging Face on several devices, and on several workers, ends with the values of one device."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="needs the package accelerate")
pytest.importorskip("transformers", reason="needs the package transformers")

import transformers
from torchrun import run_by_torchrun
from trained_by_accelerate import OPTIONS
from trained_by_huggingface import trained, values_of

from mirrorc.calls.data_parallel import DataParallel
from mirrorc.integrations.huggingface import DataParallelMixin, DataParallelTrainer

pytestmark = pytest.mark.slow


def assert_same(values: dict[str, Any], others: dict[str, Any]) -> None:
    for ours, other in zip(values["logged"], others["logged"], strict=True):
        assert ours == pytest.approx(other, rel=1e-6)
    assert values["state"].keys() == others["state"].keys()
    for name, value in values["state"].items():
        assert torch.allclose(value, others["state"][name], rtol=1e-10, atol=1e-10), name


@pytest.mark.parametrize(("task", "devices"), [("texts", 1), ("texts", 2), ("tokens", 2), ("language", 2)])
def test_a_trainer(task: str, devices: int, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "MC3101")
        ours = trained(DataParallelTrainer, task, tmp_path, devices=devices, **OPTIONS)
    assert isinstance(ours.model_wrapped, DataParallel) and ours.model_wrapped.module is ours.model
    assert_same(values_of(ours), values_of(trained(transformers.Trainer, task, tmp_path)))


def test_a_checkpoint_goes_on(tmp_path: Path) -> None:
    whole = values_of(trained(DataParallelTrainer, "texts", tmp_path, devices=2, **OPTIONS))
    checkpoint = str(tmp_path / "checkpoint-1")
    resumed = values_of(trained(DataParallelTrainer, "texts", tmp_path, checkpoint, devices=2, **OPTIONS))
    assert_same(resumed, whole)


def test_two_workers(tmp_path: Path) -> None:
    run_by_torchrun("trained_by_huggingface.py", tmp_path)
    saved = torch.load(tmp_path / "values.pt")
    plain = {task: values_of(trained(transformers.Trainer, task, tmp_path)) for task in ("texts", "language")}
    for (task, devices), values in saved.items():
        assert_same({**values, "logged": []}, {**plain[task], "logged": []})
        assert values["logged"][0]["grad_norm"] == pytest.approx(plain[task]["logged"][0]["grad_norm"]), devices
    assert saved["texts", "one device"]["batches"] == 0 < saved["texts", "uneven devices"]["batches"]


def test_a_loss_of_the_trainers_sees_the_whole_batch(tmp_path: Path) -> None:
    class Trainer(DataParallelMixin, transformers.Trainer):
        pass

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        logits = torch.nn.functional.normalize(outputs.logits, dim=1)
        return (logits @ logits.T - (labels[:, None] == labels).double()).square().mean()

    ours = trained(Trainer, "texts", tmp_path, compute_loss_func=loss, devices=2, **OPTIONS)
    plain = trained(transformers.Trainer, "texts", tmp_path, compute_loss_func=loss)
    for trainer in (ours, plain):
        trainer.train()  # once more
    assert_same(values_of(ours), values_of(plain))
