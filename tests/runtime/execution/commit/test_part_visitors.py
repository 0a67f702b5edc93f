"""What a wait does with its share while it is made, is what the nodes behind it would do with the whole."""

import math
from typing import Any

import pytest
import torch
from tiny_programs import sgd_step
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.options.table import grouped
from mirrorc.runtime.execution.binding import binder
from mirrorc.runtime.state.shares import pieces, product_pieces


def trained(**options: Any) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(3000, 50), nn.Linear(50, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    found: list[Any] = []
    with mirrorc.compile(
        net, 2, optimizer=optimizer, loss_fn=F.mse_loss, **grouped({"backend": "eager", **options})
    ) as step:
        for i in range(4):
            target = torch.randn(6, 3)
            target[4, 2] = math.nan if i == 2 else 1.0
            step(torch.randint(0, 3000, (6,)), target=target)
            found += [step.grad_norm] if "clip_grad_norm" in options else []
        return [*found, step.num_skipped, *(p.detach().clone() for p in net.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_norm": 0.02, "check_finite": "skip"},
        pytest.param({"clip_grad_value": 0.001}, marks=pytest.mark.slow),
        pytest.param({"clip_grad_value": 0.001, "check_finite": "skip"}, marks=pytest.mark.slow),
        pytest.param({"clip_grad_norm": mirrorc.ClipGradNorm(0.1, math.inf)}, marks=pytest.mark.slow),
    ],
)
def test_parts_give_what_the_whole_gives(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(binder, "visitors_of", lambda wait: {})
        expected = trained(**options)
    for most in (7, 2**18):
        for module in (product_pieces, pieces):
            monkeypatch.setattr(module, "CACHED_ELEMENTS", most)
        found = trained(**options)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("link", ["copy", "shared-memory"])
@pytest.mark.parametrize("options", [{"clip_grad_norm": mirrorc.ClipGradNorm(0.05, math.inf)}, {"check_finite": True}])
def test_an_empty_share_has_no_part(link: str, options: dict[str, Any]) -> None:
    nets = [nn.Linear(1, 1) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    x = torch.randn(6, 1)
    with sgd_step(nets[0], 3, loss_fn=F.mse_loss, link=link, **options) as step:
        step(x, target=2 * x)
    F.mse_loss(nets[1](x), 2 * x).backward()
    if "clip_grad_norm" in options:
        nn.utils.clip_grad_norm_(nets[1].parameters(), 0.05, math.inf)
    torch.optim.SGD(nets[1].parameters(), lr=0.1).step()
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)
