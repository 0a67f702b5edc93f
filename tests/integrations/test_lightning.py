"""Lightning's Trainer and Fabric on several devices, and on several workers, end with the values of one device."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="needs the package lightning")

import lightning as L
from torchrun import run_by_torchrun
from trained_by_lightning import OPTIONS, Classifier, Manual, Outside, Weighted, loader, trained, trained_by_fabric

from mirrorc.errors import ExecutionError
from mirrorc.integrations.lightning import MirrorcFabricStrategy, MirrorcStrategy

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def assert_same(values: dict[str, torch.Tensor], others: dict[str, torch.Tensor], tolerance: float = 1e-10) -> None:
    assert values.keys() == others.keys()
    for name, value in values.items():
        assert torch.allclose(value, others[name], rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("kind", [Classifier, Weighted, Manual, Outside], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_trainer(kind: type[Classifier], devices: int, tmp_path: Path) -> None:
    ours, other = kind(), kind()
    trainer = trained(ours, tmp_path, "shuffled", strategy=MirrorcStrategy(**OPTIONS), devices=devices)
    plain = trained(other, tmp_path, "shuffled", devices=1)
    assert_same(ours.state_dict(), other.state_dict())
    assert trainer.global_step == plain.global_step > 0
    our_metrics, metrics = ({k: float(v) for k, v in each.callback_metrics.items()} for each in (trainer, plain))
    assert our_metrics == pytest.approx(metrics) and "accuracy" in metrics
    assert trainer.world_size == 1 and "forward" not in ours.net.__dict__


def test_its_name_is_registered(tmp_path: Path) -> None:
    ours, other = Classifier(), Classifier()
    options = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0}
    assert isinstance(trained(ours, tmp_path, strategy="mirrorc", **options).strategy, MirrorcStrategy)
    trained(other, tmp_path, **options)
    assert_same(ours.state_dict(), other.state_dict())


def test_mixed_precision(tmp_path: Path) -> None:
    first = Classifier()
    ours, other = Classifier(), Classifier()
    trained(ours, tmp_path, strategy=MirrorcStrategy(**OPTIONS), devices=2, precision="bf16-mixed")
    trained(other, tmp_path, devices=1, precision="bf16-mixed")
    assert_same(ours.state_dict(), other.state_dict(), 5e-3)
    assert not torch.allclose(ours.net[0].weight, first.net[0].weight, atol=2e-2)


def test_checkpoints_have_the_names_of_the_plain_model_and_training_goes_on(tmp_path: Path) -> None:
    parallel: Any = {"strategy": MirrorcStrategy(**OPTIONS), "devices": 2}
    trainer = trained(Classifier(), tmp_path, max_epochs=1, **parallel)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert list(saved["state_dict"]) == list(Classifier().state_dict()) and saved["global_step"] == 2
    resumed, plain = Classifier(), Classifier()
    trained(resumed, tmp_path, checkpoint=tmp_path / "last.ckpt", strategy=MirrorcStrategy(**OPTIONS), devices=2)
    trained(plain, tmp_path, checkpoint=tmp_path / "last.ckpt", devices=1)
    assert_same(resumed.state_dict(), plain.state_dict())
    whole = Classifier()
    trained(whole, tmp_path, devices=1)
    assert_same(resumed.state_dict(), whole.state_dict(), 1e-6)  # Lightning loads checkpoints in single precision


def test_evaluation_alone(tmp_path: Path) -> None:
    trainer = trained(Classifier(), tmp_path, strategy=MirrorcStrategy(**OPTIONS), devices=2, max_epochs=0)
    plain = trained(Classifier(), tmp_path, max_epochs=0)
    ours, other = (each.validate(Classifier().double(), loader(7), verbose=False) for each in (trainer, plain))
    assert ours == [pytest.approx(other[0])]


@pytest.mark.parametrize("devices", [1, 2])
def test_fabric(devices: int) -> None:
    strategy = MirrorcFabricStrategy(**OPTIONS)
    assert_same(trained_by_fabric(strategy=strategy, devices=devices), trained_by_fabric(devices=1))


def test_a_strategy_of_fabric_that_is_torn_down_gives_the_module_its_forward_back() -> None:
    fabric = L.Fabric(accelerator="cpu", strategy=MirrorcFabricStrategy(**OPTIONS), devices=2)
    fabric.launch()
    net = torch.nn.Linear(4, 3)
    x = torch.randn(5, 4)
    expected = net(x)
    model = fabric.setup(net)
    assert torch.allclose(model(x), expected) and "forward" in net.__dict__
    (parallel,) = fabric.strategy._forwards[net]._parallel.values()
    fabric.strategy.teardown()
    assert "forward" not in net.__dict__ and torch.equal(net(x), expected)
    with pytest.raises(ExecutionError, match="MC5003"):
        parallel(x)


def test_two_workers(tmp_path: Path) -> None:
    run_by_torchrun("trained_by_lightning.py", tmp_path)
    values = torch.load(tmp_path / "values.pt")
    for kind in (Classifier, Manual):
        model = kind()
        plain = trained(model, tmp_path, "of workers", devices=1)
        state, global_step, metrics = values[kind.__name__]
        assert_same(state, model.state_dict())
        assert global_step == plain.global_step and "accuracy" in metrics
    assert_same(values["Fabric"], trained_by_fabric(devices=1))
    for name in ("Outside", "OutsideByArgument"):
        assert "MC3305: parameter 'temperature' is used outside of a forward" in values[name]
    assert "MC3305: parameter '0.weight' is used outside of a forward" in values["Fabric with a penalty"]
