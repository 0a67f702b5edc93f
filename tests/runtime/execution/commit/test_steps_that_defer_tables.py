"""Tables whose rows are scattered behind the commit are those that are made before it, and nobody looks at them too soon."""

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

OPTIMIZERS: dict[str, Any] = {
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
}


class Lookup(nn.Module):
    def __init__(self, width: int, root: float = 1.0) -> None:
        super().__init__()
        self.table = nn.Embedding(4000, width)
        self.root = nn.Parameter(torch.tensor(root))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.table(indices) + self.root.sqrt()


def trained(optimizer: str, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = Lookup(50)
    results: list[torch.Tensor] = []
    if "scaler" in options:
        options = options | {"scaler": torch.amp.GradScaler("cpu", init_scale=options["scaler"])}
    torch_optimizer = OPTIMIZERS[optimizer](net.parameters())
    with mirrorc.compile(
        net, 2, optimizer=torch_optimizer, loss_fn=F.mse_loss, **grouped({"backend": "eager", **options})
    ) as step:
        for i, size in enumerate((4, 5, 4, 5)):
            x, target = torch.randint(4000, (size,)), torch.randn(size, 50)
            x[:2] = 7
            target[3, 2] = math.nan if i == 2 and ("check_finite" in options or "scaler" in options) else 1.0
            step(x, target=target)
            results += [step.grad_norm] if "clip_grad_norm" in options else []
    return [*results, *(p.detach().clone() for p in net.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "is_deferred"),
    [
        ({"clip_grad_norm": 0.02, "check_finite": "skip"}, True),
        pytest.param({"clip_grad_norm": 1e6, "microbatches": 2}, True, marks=pytest.mark.slow),
        pytest.param({"check_finite": "skip"}, True, marks=pytest.mark.slow),
        pytest.param({"scaler": 1024.0}, True, marks=pytest.mark.slow),
        ({"scaler": 1024.0, "clip_grad_norm": 0.02}, True),
        pytest.param({"clip_grad_norm": 0.02, "exact_order": True}, False, marks=pytest.mark.slow),
        pytest.param({"clip_grad_norm": mirrorc.ClipGradNorm(0.1, math.inf)}, False, marks=pytest.mark.slow),
        pytest.param({"clip_grad_value": 0.001, "check_finite": "skip"}, False, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("optimizer", ["fused", pytest.param("foreach", marks=pytest.mark.exhaustive)])
def test_what_is_made_late_is_what_would_be_made_at_once(
    options: dict[str, Any], is_deferred: bool, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deferred: list[object] = []
    defer = binder.DeferredTables._defer

    def noting(tables: binder.DeferredTables, *piece: Any) -> None:
        deferred.append(piece)
        defer(tables, *piece)

    monkeypatch.setattr(binder.DeferredTables, "_defer", noting)
    late = trained(optimizer, **options)
    assert bool(deferred) == is_deferred
    monkeypatch.setattr(binder, "is_known_by_rows", lambda wait: False)
    deferred.clear()
    at_once = trained(optimizer, **options)
    assert not deferred
    for one, other in zip(late, at_once, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}])
def test_what_is_not_made_yet_is_not_called_infinite(options: dict[str, Any]) -> None:
    """The memory of a table holds what an earlier step has left there."""
    net = Lookup(50, root=0.0)
    x, target = torch.tensor([0, 1, 2, 3999]), torch.zeros(4, 50)
    with sgd_step(net, 2, loss_fn=F.mse_loss, check_finite=True, **options) as step:
        with pytest.raises(mirrorc.NonFiniteError, match=r"'root' is not finite .* so is that of 1 other"):
            step(x, target=target * math.nan)
        with pytest.raises(
            mirrorc.NonFiniteError, match=r"gradient of 'root' is not finite \(1 of 1 element"
        ) as raised:
            step(x, target=target)
    assert "other variable" not in str(raised.value)


@pytest.mark.parametrize("row", [1e38, 5e37])
def test_sums_of_finite_rows_may_overflow(row: float) -> None:
    """They are looked at when they may, and a step whose sums do not overflow in the end is made."""
    net = nn.Embedding(4000, 8)
    x, target = torch.full((4,), 7), torch.zeros(4, 8)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output.detach() * 0 + (output - output.detach()) * (row / 1e18) * 32e18 + target).mean()

    with sgd_step(net, 2, lr=0.0, loss_fn=loss_fn, check_finite="skip") as step:
        step(x, target=target)
        assert step.num_skipped == (1 if row == 1e38 else 0)


def test_what_a_skipped_step_has_deferred_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both by the functions that a thread for each device runs and by those of one thread, after both were bound."""
    made: list[binder.DeferredTables] = []
    construct = binder.DeferredTables.__init__

    def noting(tables: binder.DeferredTables, *arguments: Any) -> None:
        made.append(tables)
        construct(tables, *arguments)

    monkeypatch.setattr(binder.DeferredTables, "__init__", noting)
    net = nn.Embedding(4000, 50)
    with sgd_step(net, 2, loss_fn=F.mse_loss, check_finite="skip") as step:
        x, target = torch.tensor([0, 1, 3998, 3999]), torch.zeros(4, 50)
        target[2:] = math.inf  # of which the first device, which has the other rows, finds nothing
        step(x, target=target)
        for interleaves in (True, False):
            trial = step._runs.last.trial  # type: ignore[union-attr]
            trial.interleaves, trial.is_decided = interleaves, True
            step(x, target=target)
            assert not any(tables._tables for tables in made)
        assert step.num_skipped == 3
    assert len(made) == 4
