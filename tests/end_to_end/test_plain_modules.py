"""A module of `mirrorc.data_parallel` whose model Dynamo cannot trace runs as plain PyTorch, and trains as on one device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from module_twins import PLAIN, Both, assert_close, batch, net
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mirrorc
from mirrorc.capture.eager.eager_run import Run
from mirrorc.errors import CaptureError


class Branching(nn.Module):
    """Goes by a value, counts its calls, and uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.even, self.odd = (nn.Linear(6, size).double() for size in (6, 3, 3))
        self.drop, self.calls = nn.Dropout(0.5), 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.calls += 1
        hidden = self.layer(x).tanh()
        logits = self.odd(hidden) if self.calls % 2 else self.even(hidden)
        if hidden.sum().item() > 1e9:
            logits = logits * 2
        return logits, {"mean": hidden.square().mean(), "labels": logits.argmax(1)}


def losses(model: nn.Module, num_steps: int, sizes: tuple[int, ...] = (5, 2, 7)) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for step in range(num_steps):
        x, y = batch(sizes[step % len(sizes)], step)
        optimizer.zero_grad()
        logits, more = model(x.requires_grad_())
        loss = F.cross_entropy(logits, y) + (more["mean"] if step % 3 else 0)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found += [loss.detach(), x.grad]
    return found


@pytest.mark.parametrize("devices", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_a_model_that_cannot_be_traced_trains_after_a_warning(devices: int) -> None:
    both = Both(Branching().eval(), devices)
    with pytest.warns(UserWarning, match=r"MC2701.*Branching"):
        both.parallel(batch(4)[0])
    both.plain(batch(4)[0])
    for own, other in zip(*both.run(lambda model: losses(model, 6)), strict=True):
        assert_close(own, other)
    both.check()
    assert both.parallel.module.calls == both.plain.calls == 7
    assert len(both.parallel.programs) == 2 and "as plain PyTorch" in both.parallel.programs[1].to_text()
    both.close()


class Dropped(nn.Module):
    """Drops out in a checkpoint, so that backward draws again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drop = nn.Linear(6, 8).double(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = self.layer(x) + (1 if x.sum().item() > 1e9 else 0)
        return checkpoint(self.drop, shifted, use_reentrant=False)


def test_its_random_numbers_are_new_in_each_forward_and_the_same_in_backward() -> None:
    both = Both(Dropped(), 2, PLAIN)
    x = batch(6)[0]
    first, again = (both.parallel(x) for _ in range(2))
    assert not torch.equal(first, again)
    again.sum().backward()
    bias = both.parallel.module.layer.bias.grad
    assert bias is not None and torch.equal(bias, 2.0 * (again != 0).sum(0))
    both.close()


def runs_alive() -> int:
    return sum(isinstance(known, Run) and bool(known.attached) for known in gc.get_objects())


def test_several_forwards_wait_for_their_backwards_and_are_freed_without_one() -> None:
    both = Both(Branching().eval(), 2, PLAIN)

    def use(model: nn.Module) -> None:
        outputs = [model(batch(size, size)[0])[0] for size in (3, 5, 4)]
        (outputs[2].square().mean() + outputs[0].sum()).backward()

    both.run(use)
    both.check()
    gc.collect()
    gc.disable()
    try:
        dropped = both.parallel(batch(3)[0])[0]
        assert runs_alive() == 2, "one for each device"
        del dropped
        assert not runs_alive(), "a cycle would keep all activations until a collection"
    finally:
        gc.enable()
    both.close()


class Masked(nn.Module):
    """Without labels, the loss is a constant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        labelled = y >= 0
        if not labelled.any():
            return x.new_zeros(len(x))
        return F.cross_entropy(self.layer(x), y.clamp(min=0), reduction="none") * labelled


def test_outputs_need_a_gradient_in_some_calls_and_on_some_devices() -> None:
    both = Both(Masked(), 2, PLAIN)
    x = batch(4)[0]
    for labels in ([-1, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, 0], [-1, -1, -1, -1], [-1, -1, 1, 0]):
        own, other = (model(x, torch.tensor(labels)).sum() for model in both)
        assert_close(own.detach(), other.detach())
        assert own.requires_grad is other.requires_grad
        if own.requires_grad:
            own.backward()
            other.backward()
        both.check()
    both.close()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, factor = ctx.saved_tensors
        return gradient * factor, (gradient * x).sum().reshape(factor.shape)


class Apart(nn.Module):
    """Two halves that share nothing; the second is an autograd.Function of an argument of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.factor = nn.Linear(6, 3).double(), nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x) + (1 if x.sum().item() > 1e9 else 0), Doubled.apply(z, self.factor)


def test_what_the_loss_does_not_reach_is_not_run_and_may_be_updated_meanwhile() -> None:
    both = Both(Apart(), 2, PLAIN)

    def use(model: nn.Module) -> list[torch.Tensor | None]:
        inner = getattr(model, "module", model)
        x, z = (batch(5, seed)[0].requires_grad_() for seed in (1, 2))
        first, second = model(x, z), model(x, z)
        first[0].square().sum().backward()
        assert z.grad is None and inner.factor.grad is None
        torch.optim.SGD(inner.left.parameters(), lr=0.1).step()
        second[1].sum().backward()  # needs nothing of what was updated
        return [x.grad, z.grad]

    for own, other in zip(*both.run(use), strict=True):
        assert own is not None and other is not None
        assert_close(own, other)
    both.check()
    both.close()


class Partial(nn.Module):
    """Each output has a layer of its own, of which a shard may use none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.never = (nn.Linear(6, 2).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = self.left(x) if x.sum().item() > -1e9 else self.never(x)
        return left, self.right(x)


@pytest.mark.parametrize("reached", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_the_loss_does_not_reach_gets_no_gradient(reached: int) -> None:
    both = Both(Partial(), 2, PLAIN)
    both.run(lambda model: model(batch(5)[0])[reached].square().sum().backward())
    both.check()
    assert both.parallel.module.never.weight.grad is None
    assert (both.parallel.module.right.weight.grad is None) == (reached == 0)
    both.close()


@pytest.mark.slow
def test_spectral_norms_have_one_vector_on_all_replicas() -> None:
    both = Both(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))).double(), 3, PLAIN)
    for own, other in zip(*both.run(lambda m: [m(batch(size)[0]).square().mean() for size in (4, 7)]), strict=True):
        assert_close(own, other)
        own.backward()
        other.backward()
    both.check()
    both.close()


class Outside(nn.Module):
    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3).double(), [scale]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale[0]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 3, sparse=True)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.rows(words)


class Complex(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(super().forward(x), x[:, :3])


@pytest.mark.parametrize(
    ("model", "argument", "code"),
    [
        (Outside(torch.ones(3, dtype=torch.float64, requires_grad=True)), batch(4)[0], "MC3305"),
        (Words(), torch.arange(4), "MC2501"),
        (Complex(6, 3).double(), batch(4)[0], "MC2203"),
    ],
    ids=["a tensor outside", "sparse", "complex"],
)
def test_what_it_cannot_keep_is_refused(model: nn.Module, argument: torch.Tensor, code: str) -> None:
    with mirrorc.data_parallel(model, 2, compiler=PLAIN) as parallel, pytest.raises(CaptureError, match=code):
        parallel(argument)


def test_a_backward_is_made_once_unless_its_graph_is_kept() -> None:
    both = Both(net(), 2, PLAIN)

    def loss() -> Any:
        return both.parallel(batch(5)[0]).square().mean()

    once = loss()
    once.backward()
    with pytest.raises(RuntimeError, match="second time"):
        once.backward()
    both.close()
