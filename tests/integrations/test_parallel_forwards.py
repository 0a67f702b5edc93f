"""Modules whose forward runs on several devices in place compute what they did, and stay what they were."""

import contextlib
import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mirrorc
from mirrorc.calls.data_parallel import DataParallel
from mirrorc.errors import ExecutionError
from mirrorc.integrations.parallel_forwards import ParallelForwards, check_parameters

EAGER = mirrorc.Compiler(backend="eager")
QUIET = mirrorc.Debug(progress=False)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(4, 3).double(), nn.Linear(3, 2).double()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).tanh())


def wrap(module: nn.Module) -> Any:
    return mirrorc.data_parallel(module, 2, compiler=EAGER, debug=QUIET)


@pytest.fixture
def pair() -> Iterator[tuple[Pair, ParallelForwards]]:
    model = Pair()
    forwards = ParallelForwards([model, model.encoder, model.head], wrap)
    forwards.install()
    yield model, forwards
    forwards.close()


def test_gradients_are_those_of_the_plain_module_however_it_is_called(pair: tuple[Pair, ParallelForwards]) -> None:
    model, forwards = pair
    plain, x = Pair(), torch.randn(5, 4, dtype=torch.float64)
    for each in (model, plain):
        (each(x).square().mean() + each.head(each.encoder(x)).sum() + each.scale.sum()).backward()
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, other.grad, rtol=1e-12, atol=1e-12)
    forwards.close()
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_names_and_copies_are_those_of_plain_modules(pair: tuple[Pair, ParallelForwards]) -> None:
    model, _ = pair
    x = torch.randn(5, 4, dtype=torch.float64)
    expected = model(x)
    assert list(model.state_dict()) == list(Pair().state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.allclose(other(x), expected)
        with torch.no_grad():
            other.head.bias.add_(1)
        assert torch.allclose(other(x), expected + 1)


def test_hooks_of_a_module_run_around_its_forward_alone(pair: tuple[Pair, ParallelForwards]) -> None:
    model, _ = pair
    calls = []
    x = torch.randn(4, 4, dtype=torch.float64)
    expected = Pair()(x)
    model.register_forward_hook(lambda _module, _args, output: calls.append(output.shape) or output + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(torch.allclose(model(x), expected + 1) for _ in range(2))
    assert calls == [(4, 2)] * 2


def test_parameters_used_outside_of_forwards_are_found(pair: tuple[Pair, ParallelForwards]) -> None:
    model, _ = pair
    x = torch.randn(5, 4, dtype=torch.float64)
    check_parameters(model(x).square().mean(), model)
    with pytest.raises(ExecutionError, match="MC3305: parameter 'scale'"):
        check_parameters((model(x) * model.scale).mean(), model)


def test_parameters_that_reach_a_forward_by_its_arguments_are_found(pair: tuple[Pair, ParallelForwards]) -> None:
    model, _ = pair
    x = torch.randn(5, 3, dtype=torch.float64)
    arguments = {
        "encoder.bias": model.head(x * model.encoder.bias),
        "encoder.weight": model.head(x * model.encoder(model.encoder.weight).sum()),
        "head.weight": model.head(model.head.weight),
        "scale": model.head(model.encoder(x @ x.new_ones(3, 4) * model.scale.sum()).tanh()),
    }
    for name, output in arguments.items():
        with pytest.raises(ExecutionError, match=f"MC3305: parameter '{name}'"):
            check_parameters(output.sum(), model)
    check_parameters(model.head(model.encoder(x @ x.new_ones(3, 4)).tanh()).sum(), model)


def test_inputs_that_require_gradients_are_no_parameters(pair: tuple[Pair, ParallelForwards]) -> None:
    model, _ = pair
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    other = nn.Parameter(torch.ones(4, dtype=torch.float64))
    check_parameters(model(x * other).sum() + x.sum(), model)


def test_modules_that_are_made_within_no_sync_are_not_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def no_sync(parallel: Any) -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    monkeypatch.setattr(DataParallel, "no_sync", no_sync)
    model = Pair()
    forwards = ParallelForwards([model.encoder], wrap)
    with forwards.installed():
        for _ in range(2):
            with forwards.no_sync():
                model.encoder(torch.randn(2, 4, dtype=torch.float64))
    forwards.close()
    assert entered == ["in", "out"] * 2
