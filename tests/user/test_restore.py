"""Tracing leaves the model as it was, however its modules are registered, and whatever a tracer does to it."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from references import assert_same_model, train_step
from tiny_programs import sgd_step
from torch import nn

import mirrorc
from mirrorc.capture.call.traced_loss import TracedLoss
from mirrorc.capture.front_ends.front_end import FrontEnd, register_front_end, unregister_front_end
from mirrorc.user.restore import put_back_after, restored


class Chain(nn.Module):
    """Modules that are called one after the other, which may be the same one."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self._modules.values():
            x = module(x)  # type: ignore[misc]
        return x.pow(2).mean()


def registered_twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return Chain(a=layer, b=nn.Tanh(), c=layer)


def registered_thrice_and_nested() -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    return Chain(a=nn.Sequential(block, nn.Linear(4, 4)), b=block, c=nn.Sequential(nn.Sequential(block)))


def registered_but_called_by_one_name() -> nn.Module:
    model = registered_twice()
    model.c = nn.Sequential()
    model.list = nn.Sequential(nn.Tanh())
    model.again = model.list[0]
    return model


def tied_in_one_module() -> nn.Module:
    class Twice(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.same, self.other = self.weight, nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight + self.same.t(), self.other)

    return Chain(a=Twice())


MODELS = [registered_twice, registered_thrice_and_nested, registered_but_called_by_one_name, tied_in_one_module]


@contextlib.contextmanager
def same_objects(model: nn.Module) -> Iterator[None]:
    """Checks that a block leaves every module with its own members, and every tensor with its own values."""

    def seen() -> list[Any]:
        return [(name, member) for module in model.modules() for name, member in _members(module)]

    before, values = seen(), copy.deepcopy(model.state_dict())
    yield
    after = seen()
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(a is b for (_, a), (_, b) in zip(after, before, strict=True))
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def _members(module: nn.Module) -> list[tuple[str, Any]]:
    tables = (module._parameters, module._buffers, module._modules)
    return [*module.__dict__.items(), *(member for table in tables for member in table.items())]


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_a_module_under_several_names_is_trained_as_in_pytorch(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    optimizer, of_twin = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin))
    for seed in range(3):
        batch = {"x": torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))}
        if seed == 0:
            step = mirrorc.compile(model, 1, optimizer=optimizer, compiler=mirrorc.Compiler(backend="eager"))
            with same_objects(model):
                step.prepare(**batch)
        assert step(**batch).item() == pytest.approx(train_step(twin, of_twin, batch), rel=1e-12)
    step.close()
    assert_same_model(model, twin, 1e-12)


@pytest.mark.slow
def test_a_failed_capture_leaves_the_model() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    model, x = Chain(first=registered_thrice_and_nested().b, branch=Branching()), torch.randn(6, 4, dtype=torch.float64)
    model.second = model.first
    with sgd_step(model, 1, capture="dynamo") as step:
        for _ in range(2):
            with same_objects(model), pytest.raises(mirrorc.CaptureError):
                step(x)
    model(x).backward()


class Careless(FrontEnd):
    name = "careless"

    def trace(self, stack: Any, call: TracedLoss, leaves: Any, decompositions: Any) -> Any:
        module: Any = call.model
        module.norm(torch.randn(6, 4))  # writes statistics, without a new version
        module.weight.data = torch.zeros(4)
        module.weight.requires_grad_(False)
        module.weight.grad = torch.ones(4)
        module._parameters["weight"], module.norm = nn.Parameter(torch.ones(2)), nn.Identity()
        module.note, module.seen[:] = "new", []
        module.numbers.clear()
        del module.left
        module.register_forward_hook(lambda *_: None)
        raise RuntimeError("careless")


def test_whatever_a_tracer_does_is_undone() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.weight = nn.BatchNorm1d(4), nn.Parameter(torch.randn(4))
            self.seen, self.numbers, self.left = [torch.ones(1), 2], {"a": 1, "b": torch.ones(2)}, "left"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.norm(x) * self.weight).mean()

    model, x = Model(), torch.randn(6, 4)
    seen, numbers, data = list(model.seen), dict(model.numbers), model.weight.data_ptr()
    register_front_end(Careless())
    try:
        step = sgd_step(model, 1, capture="careless")
        with same_objects(model), pytest.raises(RuntimeError, match="careless"):
            step(x)
        step.close()
    finally:
        unregister_front_end("careless")
    assert model.weight.data_ptr() == data and model.weight.requires_grad and model.weight.grad is None
    assert all(a is b for a, b in zip(model.seen, seen, strict=True))
    assert list(model.numbers) == list(numbers) and model.numbers["b"] is numbers["b"]
    assert not model._forward_hooks


def test_a_buffer_that_is_not_a_number_counts_as_kept() -> None:
    model = nn.BatchNorm1d(2)
    model.running_mean.fill_(float("nan"))
    version = model.running_mean._version
    with restored(model):
        pass
    assert model.running_mean._version == version


@pytest.mark.parametrize("raises", [False, True])
def test_tensors_have_their_shape_and_kind_again_and_the_block_s_error_is_raised(raises: bool) -> None:
    model = nn.BatchNorm1d(3)
    model.running_mean.copy_(torch.arange(3.0))
    values = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="of the block") if raises else contextlib.nullcontext(), restored(model):
        model.running_mean.resize_(500)
        model.running_var.data = torch.ones(2, dtype=torch.float64)
        model.weight.data = model.weight.data[:2]
        if raises:
            raise ValueError("of the block")
    assert all(
        torch.equal(value, values[name]) and value.dtype == values[name].dtype
        for name, value in model.state_dict().items()
    )
    assert model.running_mean.untyped_storage().nbytes() == 3 * 4


def test_all_is_put_back_but_what_cannot_be() -> None:
    first = torch.zeros(3)

    def failing() -> None:
        raise OSError("of putting back")

    with pytest.raises(OSError, match="of putting back"), put_back_after([failing, first.zero_]):
        first.fill_(1.0)
    assert not first.any()
    with pytest.raises(ValueError, match="of the block") as caught, put_back_after([failing, first.zero_]):
        first.fill_(1.0)
        raise ValueError("of the block")
    assert not first.any() and "OSError: of putting back" in caught.value.__notes__[0]
