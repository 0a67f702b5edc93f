"""A loop for Accelerate on several devices, and on several workers, ends with the values of one device."""

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate", reason="needs the package accelerate")

import accelerate
from torchrun import run_by_torchrun
from trained_by_accelerate import OPTIONS, accelerated, trained

from mirrorc.calls.data_parallel import DataParallel
from mirrorc.errors import ExecutionError
from mirrorc.integrations.accelerate import Accelerator

pytestmark = pytest.mark.slow


def assert_same(values: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert values.keys() == others.keys()
    for name, value in values.items():
        assert torch.allclose(value, others[name], rtol=1e-10, atol=1e-10), name


@pytest.mark.parametrize("devices", [1, 2])
def test_a_loop(devices: int, tmp_path: Path) -> None:
    ours = trained(accelerated(Accelerator, devices=devices, **OPTIONS), tmp_path)
    assert_same(ours, trained(accelerated(accelerate.Accelerator), tmp_path))


def test_a_saved_state_goes_on_with_and_without_mirrorc(tmp_path: Path) -> None:
    whole = trained(accelerated(Accelerator, devices=2, **OPTIONS), tmp_path, saves=True)
    assert_same(trained(accelerated(Accelerator, devices=2, **OPTIONS), tmp_path, resumes=True), whole)
    assert_same(trained(accelerated(accelerate.Accelerator), tmp_path, resumes=True), whole)


def test_two_workers(tmp_path: Path) -> None:
    run_by_torchrun("trained_by_accelerate.py", tmp_path)
    assert_same(torch.load(tmp_path / "values.pt"), trained(accelerated(accelerate.Accelerator), tmp_path))


def test_mixed_precision_is_around_the_module() -> None:
    accelerator = accelerated(Accelerator, devices=2, mixed_precision="bf16", **OPTIONS)
    net = nn.Linear(4, 3)
    model = accelerator.prepare(net)
    x = torch.randn(6, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = net(x)
    assert model(x).dtype == torch.float32 and torch.equal(model(x), expected.float())
    assert accelerator.unwrap_model(model) is net
    accelerator.free_memory()
    assert torch.equal(model(x), expected.float())
    accelerator.prepare_model(model)
    accelerator.end_training()
    with pytest.raises(ExecutionError, match="MC5003"):
        model(x)


def test_models_that_are_not_trained_stay_as_they_are() -> None:
    accelerator = accelerated(Accelerator, devices=2, **OPTIONS)
    frozen, evaluated = nn.Linear(4, 3).requires_grad_(False), nn.Linear(4, 3)
    assert accelerator.prepare(frozen) is frozen
    assert accelerator.prepare_model(evaluated, evaluation_mode=True) is evaluated
    assert isinstance(accelerator.prepare(nn.Linear(4, 3)), DataParallel)
