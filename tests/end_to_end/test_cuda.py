"""The same meaning on GPUs: one, and two logical devices on one. Runs where torch sees a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import mirrorc

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")

DEVICES = {"one": ["cuda:0"], "two-logical": ["cuda:0", "cuda:0/1"]}


def make_net(p: float = 0.0) -> torch.nn.Module:
    layers = [torch.nn.Linear(12, 40), torch.nn.ReLU(), torch.nn.Dropout(p), torch.nn.Linear(40, 5)]
    return torch.nn.Sequential(*layers).double()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("devices", DEVICES.values(), ids=list(DEVICES))
def test_five_steps_agree_with_one_cpu(devices: list[str], backend: str) -> None:
    torch.manual_seed(0)
    model = make_net()
    reference = copy.deepcopy(model)
    x, y = torch.randn(7, 12).double(), torch.randint(0, 5, (7,))
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with mirrorc.compile(
        model, devices, optimizer=optimizer, loss_fn=F.cross_entropy, backend=backend, bucket_cap_mb=0.001
    ) as step:
        for _ in range(5):
            expected.zero_grad()
            loss = F.cross_entropy(reference(x), y)
            loss.backward()
            expected.step()
            torch.testing.assert_close(step(x.cuda(), target=y.cuda()).cpu(), loss.detach(), rtol=1e-10, atol=1e-12)
        for variable in step.variables.values():
            assert all(torch.equal(variable.values[0], other) for other in variable.values)
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert found.is_cuda
        torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=1e-9, atol=1e-10)


def test_two_runs_are_equal_bit_for_bit() -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = make_net(0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = torch.randn(8, 12).double(), torch.randint(0, 5, (8,))
        with mirrorc.compile(
            model, DEVICES["two-logical"], optimizer=optimizer, loss_fn=F.cross_entropy, backend="eager"
        ) as step:
            for _ in range(3):
                step(x, target=y)
        return [parameter.detach().cpu() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))
