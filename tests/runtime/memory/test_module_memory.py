"""What forward of a module keeps is counted in forward, once it is there, and in all of backward."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mirrorc
from mirrorc.runtime.memory.report import DeviceMemory, MemoryReport

ROWS = 24


@pytest.fixture(params=["one region", pytest.param("cut where replicas meet", marks=pytest.mark.slow)])
def module(request: pytest.FixtureRequest) -> Iterator[Any]:
    torch.manual_seed(0)
    norm = nn.SyncBatchNorm(64) if request.param == "cut where replicas meet" else nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), norm, nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))
    compiler, debug = mirrorc.Compiler(backend="eager"), mirrorc.Debug(progress=False)
    module = mirrorc.data_parallel(model, 2, compiler=compiler, debug=debug)
    yield module
    module.close()


def kept_bytes(output: torch.Tensor, replica: int) -> int:
    run: Any = output.grad_fn.run  # type: ignore[union-attr]
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage() for value in run.kept[replica]}
    return sum(storage.nbytes() for storage in storages.values())


def at_commit(device: DeviceMemory) -> int:
    return next(num_bytes for name, num_bytes in device.within_calls.items() if name.startswith("commit"))


def memory_of(module: Any, way: int) -> MemoryReport:
    report = module._step.memory(module.programs[way])
    assert isinstance(report, MemoryReport)
    return report


def test_kept_activations_outlive_forward_and_are_there_in_all_of_backward(module: Any) -> None:
    output = module(torch.randn(ROWS, 16))
    kept = [kept_bytes(output, replica) for replica in range(2)]
    output.sum().backward()
    forward, backward = memory_of(module, 0), memory_of(module, 1)
    assert kept[0] > ROWS // 2 * (64 + 32) * 4
    held = [at_commit(device) for device in forward.devices]
    meets = any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules())
    assert all(a > b for a, b in zip(held, kept, strict=True)) if meets else held == kept  # copies for the other device
    for device, num_bytes in zip(backward.devices, kept, strict=True):
        calls = [number for name, number in device.within_calls.items() if name.startswith(("bwd", "b0", "commit"))]
        assert len(calls) >= 4 and min(calls) >= num_bytes
        assert device.own.activations > num_bytes
    assert all("of a module: activations that forward keeps count in" in str(report) for report in (forward, backward))


def test_the_gradients_that_autograd_gets_are_counted_beside_the_buckets(module: Any) -> None:
    module(torch.randn(ROWS, 16)).sum().backward()
    parts = [device.own.gradient_parts for device in memory_of(module, 1).devices]
    (bucket,) = module.programs[1].buckets
    assert parts == [{"buckets": bucket.num_bytes, "users": bucket.num_bytes}, {"buckets": bucket.num_bytes}]
