"""Functions with a backward of their own: one that a tracer would take wrongly runs as plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from branching import SGD, batches
from references import assert_trains_alike
from selections import slow_but
from torch import nn
from torch.nn import functional as F
from twins import Twins, same_each_time


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
