"""A step of a function that computes the loss, in place of a model and a loss_fn."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from branching import SGD, batches
from references import assert_trains_alike
from selections import slow_but
from torch import nn
from torch.nn import functional as F
from twins import Twins, same_each_time

import mirrorc
from mirrorc.options.table import grouped

pytestmark = pytest.mark.fast

EAGER = mirrorc.Compiler(backend="eager")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(size: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, dtype=torch.float64, generator=generator), torch.arange(size) % 3


GLOBAL = net()


def loss_of_a_global(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(GLOBAL(x), y)


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_function_trains_as_on_one_device(capture: str, devices: int) -> None:
    model, plain = net(), net()
    optimizer, own = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))

    def compute(model: nn.Module, x: torch.Tensor, y: torch.Tensor, scale: float) -> Any:
        logits = model(x) * scale
        accuracy = (logits.argmax(1) == y).double().mean()
        return F.cross_entropy(logits, y), {"accuracy": accuracy, "logits": logits}

    @mirrorc.train_step(model, optimizer, devices, compiler=mirrorc.Compiler(backend="eager", capture=capture))
    def step(x: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0) -> Any:
        logits = model(x) * scale
        accuracy = (logits.argmax(1) == y).double().mean()
        return F.cross_entropy(logits, y), {"accuracy": accuracy, "logits": logits}

    with step:
        for size, scale in ((7, 1.0), (7, 1.0), (6, 0.5)):
            x, y = batch(size)
            loss, metrics = step(x, y, scale=scale)
            expected, expected_metrics = compute(plain, x, y, scale)
            own.zero_grad()
            expected.backward()
            own.step()
            torch.testing.assert_close(torch.as_tensor(loss.item()), expected.detach().float(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(metrics["logits"], expected_metrics["logits"].detach(), rtol=1e-12, atol=1e-12)
            assert metrics["accuracy"] == pytest.approx(expected_metrics["accuracy"].item())
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        found, _ = step.evaluate(*batch())
        assert found.item() == pytest.approx(compute(plain, *batch(), 1.0)[0].item())
        assert next(iter(step.program.variables)) == "model.0.weight"


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_a_module_in_a_global_is_that_of_the_device(capture: str) -> None:
    optimizer = torch.optim.SGD(GLOBAL.parameters(), lr=0.1)
    compiler = mirrorc.Compiler(backend="eager", capture=capture)
    with mirrorc.compile(loss_of_a_global, 2, modules=GLOBAL, optimizer=optimizer, compiler=compiler) as step:
        first, *others = [step(*batch()).item() for _ in range(3)]
        assert all(later < first for later in others)
        assert next(iter(step.program.variables)) == "GLOBAL.0.weight"


@dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor


@pytest.mark.parametrize("shape", [dict, Result, tuple])
def test_a_step_returns_what_the_function_returns(shape: Any) -> None:
    model = net()

    def compute(x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        return (loss, logits) if shape is tuple else shape(loss=loss, logits=logits)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mirrorc.compile(compute, 2, modules=[model], optimizer=optimizer, compiler=EAGER) as step:
        for found in (step(*batch()), step.evaluate(*batch())):
            assert type(found) is shape
            loss, logits = found if shape is tuple else (found if shape is dict else vars(found)).values()
            assert loss.shape == () and logits.shape == (7, 3) and not logits.requires_grad


def test_two_networks_and_a_penalty() -> None:
    critic, actor = net(), net()
    both = [*critic.parameters(), *actor.parameters()]

    def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(actor(x) + critic(x.flip(1)), y) + 0.1 * actor(x).square().mean()

    plain = copy.deepcopy([critic, actor])
    with mirrorc.compile(
        compute, 2, modules=[critic, actor], optimizer=torch.optim.SGD(both, lr=0.1), compiler=EAGER
    ) as step:
        x, y = batch(6)
        found = step(x, y)
        expected = F.cross_entropy(plain[1](x) + plain[0](x.flip(1)), y) + 0.1 * plain[1](x).square().mean()
        assert found.item() == pytest.approx(expected.item(), rel=1e-9)
        assert {name.split(".")[0] for name in step.program.variables} == {"critic", "actor"}


def test_calls_that_make_no_step_are_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (lambda x: x, {}, TypeError, r"mirrorc\.compile\(loss_of, modules="),
        (lambda x: x, {"modules": []}, TypeError, r"modules is \[\]\n  fix:  give the modules that the function calls"),
        (lambda x: x, {"modules": [3]}, TypeError, r"modules is \[3\]\n  fix:  give the modules"),
        (model, {"modules": [model]}, ValueError, "cannot be used with a model"),
        (
            nn.Linear,
            {"modules": [model]},
            TypeError,
            r"model is a type, neither a module nor a function\n  fix:  mirrorc\.compile\(net",
        ),
        (
            lambda x: x,
            {"modules": model, "loss_fn": F.mse_loss},
            ValueError,
            "loss_fn= cannot be used with a function in place of the model",
        ),
        (
            lambda x: x,
            {"modules": model, "return_outputs": True},
            ValueError,
            "return_outputs= cannot be used with a function",
        ),
    ]
    for function, options, error, message in cases:
        with pytest.raises(error, match=message):
            mirrorc.compile(function, 2, **grouped({"optimizer": optimizer, "backend": "eager", **options}))


COUNT = 0


def counting(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return F.cross_entropy(GLOBAL(x), y)


def test_a_function_that_assigns_a_global_is_not_trained_silently_without_it() -> None:
    optimizer = torch.optim.SGD(GLOBAL.parameters(), lr=0.1)
    with (
        warnings.catch_warnings(),
        mirrorc.compile(counting, 2, modules=GLOBAL, optimizer=optimizer, compiler=EAGER) as step,
        pytest.raises(mirrorc.CaptureError),
    ):
        warnings.simplefilter("ignore")
        step(*batch())


# Functions with a backward of their own: one that a tracer would take wrongly runs as plain PyTorch.


class StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Any) -> Any:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class Unmaterialized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        first, second = gradients
        return first * 2 + (torch.ones_like(first) * 0.1 if second is None else second * 3)


class Alone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 5


class CallsAnother(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return NonDifferentiable.apply(x)[0], x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * (2 if gradients[1] is None else 3)


class NonDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        ctx.save_for_backward(signs)
        return x * signs, signs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (signs,) = ctx.saved_tensors
        return gradients[0] * signs * 2


def with_a_backward_inside(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    layer(x).square().mean().backward()
    return layer(x)


Use = Callable[[nn.Module, torch.Tensor], torch.Tensor]
USES: dict[str, tuple[Use, bool]] = {
    "alone": (lambda layer, x: StraightThrough.apply(layer(x) * 3), True),
    "within grad": (
        lambda layer, x: layer(x) + torch.func.grad(lambda v: layer(StraightThrough.apply(v)).tanh().sum())(x),
        False,
    ),
    "within vjp": (lambda layer, x: layer(x) * torch.func.vjp(StraightThrough.apply, layer(x) * 3)[1](x)[0], False),
    "within vmap": (lambda layer, x: torch.func.vmap(StraightThrough.apply)(layer(x) * 3) + x, False),
    "without materialized gradients": (lambda layer, x: Unmaterialized.apply(layer(x))[0], False),
    "around another function": (lambda layer, x: CallsAnother.apply(layer(x))[0], False),
    "with one output and gradients as they are": (lambda layer, x: Alone.apply(layer(x)), True),
    "both outputs without materialized gradients": (lambda layer, x: sum(Unmaterialized.apply(layer(x))), False),
    "beside a backward inside of forward": (with_a_backward_inside, False),
    "with an output that has no gradient": (lambda layer, x: sum(NonDifferentiable.apply(layer(x))), True),
}
"""Uses of functions, and whether they are captured."""
FAST = ("within grad", "without materialized gradients")


class Using(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(4, 4), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.layer, x)


@pytest.mark.filterwarnings("ignore:MC2701")
@pytest.mark.parametrize("name", slow_but(FAST, USES))
def test_functions_have_the_gradients_of_plain_pytorch(name: str) -> None:
    torch.manual_seed(0)
    use, is_captured = USES[name]
    with Twins(Using(use).double(), loss_fn=F.mse_loss) as pair:
        for _ in range(3):
            pair.train(torch.randn(7, 4).double(), target=torch.randn(7, 4).double())
        pair.check()
        texts = [remark.text for remark in pair.step.program.remarks]
    assert any("run as plain PyTorch" in text for text in texts) is not is_captured


class OfCurvature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = same_each_time(lambda: nn.Linear(6, 4).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hessian = torch.func.hessian(lambda row: self.layer(row).tanh().sum())
        return self.layer(x) * torch.func.vmap(hessian)(x).sum((1, 2))[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_hessian_for_each_example_trains(backend: str) -> None:
    for num_devices, sizes in ((1, [8]), (2, [8]), (3, [7, 8])) if backend == "eager" else [(2, [8])]:
        assert_trains_alike(OfCurvature(), SGD, batches(*sizes), num_devices, F.cross_entropy, backend=backend)
