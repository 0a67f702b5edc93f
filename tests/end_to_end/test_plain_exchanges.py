"""Models and losses that run as plain PyTorch and ask all replicas for values train as one device does on the whole batch."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from references import unchanged
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import Twins, compiled_step, sgd

import mirrorc
from mirrorc.packing import ByBytes

TOLERANCE = 1e-12
NUM_DEVICES = [pytest.param(n, marks=[pytest.mark.slow]) for n in (1, 2, 3)]


def doubles(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def box_loss(outputs: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """As of DETR: a sum over matched boxes, divided by the mean number of boxes of a replica."""
    matched = torch.nonzero(boxes[:, 0] > 0).squeeze(1)
    count = mirrorc.all_reduce(outputs.new_tensor(float(len(matched))), "mean")
    share = mirrorc.all_reduce(outputs.new_tensor(float(len(boxes))), "mean") / len(boxes)  # of uneven shards
    return share * (outputs - boxes)[matched].abs().sum() / count


def contrastive_loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    own, other = F.normalize(outputs, dim=1), F.normalize(outputs + target, dim=1)
    sizes = mirrorc.all_gather(torch.full((1,), len(own)))
    before = int(sizes[: int(mirrorc.replica_id())].sum())
    return F.cross_entropy(own @ mirrorc.all_gather(other).T / 0.1, before + torch.arange(len(own)))


class Centered(nn.Module):
    """As of DINO: the targets' running mean over the whole batch is taken from each target."""

    def __init__(self) -> None:
        super().__init__()
        self.student = net()
        self.register_buffer("center", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        teacher = (target - self.center).softmax(1)
        total, count = mirrorc.all_reduce(target.sum(0)), mirrorc.all_reduce(torch.tensor(len(target)))
        self.center.copy_(self.center * 0.9 + total / int(count) * 0.1)
        return -(teacher * self.student(x).log_softmax(1)).sum(1).mean()


def reduced_loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    total = mirrorc.all_reduce(outputs.sum(0))
    return F.mse_loss(outputs, target) * (1.0 if bool(outputs.sum() == 0) else 2.0) + (total**2).mean()


@pytest.mark.parametrize("num_devices", NUM_DEVICES)
@pytest.mark.parametrize("loss", [box_loss, contrastive_loss, reduced_loss])
def test_a_loss_over_the_whole_batch_equals_one_device(loss: Any, num_devices: int) -> None:
    with Twins(net(), loss_fn=loss, devices=num_devices, capture="autograd", tolerance=TOLERANCE) as pair:
        for size in (7, 6, 2):
            pair.train(doubles(size, 5), target=doubles(size, 3))
        x, y = doubles(7, 5), doubles(7, 3)
        torch.testing.assert_close(pair.step.evaluate(x, target=y), loss(pair.twin(x), y).detach())


@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_a_center_of_the_whole_batch_equals_one_device(num_devices: int) -> None:
    with Twins(Centered(), devices=num_devices, capture="autograd", tolerance=TOLERANCE) as pair:
        for size in (7, 6, 4):
            pair.train(doubles(size, 5), target=doubles(size, 3))
        torch.testing.assert_close(pair.model.center, pair.twin.center, rtol=TOLERANCE, atol=TOLERANCE)


class Draws(nn.Module):
    """Draws before and after an exchange, of which each lets other replicas draw."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.last(x) + 0.0 * torch.rand(len(x), 1)
        return h * mirrorc.all_gather(h).mean() + 0.0 * F.dropout(h)


@pytest.mark.slow
def test_replicas_that_draw_wait_for_each_other() -> None:
    with Twins(Draws(), loss_fn=F.mse_loss, devices=3, capture="autograd", tolerance=TOLERANCE) as pair:
        for size in (7, 2):
            pair.train(doubles(size, 5), target=doubles(size, 3))


class Asks(nn.Module):
    """Asks as often as the first example of the shard says, and may fail afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.last(x)
        for _ in range(int(x[0, 0])):
            h = h + mirrorc.all_reduce(h.sum(0))
        if bool((x[:, 1] == 5).any()):
            raise ValueError("an example is wrong")
        return h + mirrorc.all_gather(h if bool((x[:, 1] != 4).all()) else h[:, :2]).mean()


def asking(first: tuple[int, ...]) -> torch.Tensor:
    x = torch.zeros(6, 5, dtype=torch.float64)
    x[::2, 0] = torch.tensor(first, dtype=torch.float64)
    return x


def test_what_replicas_do_not_do_alike_is_an_error_of_all() -> None:
    """None waits for ever, and the next step is one as any other."""
    model, y = Asks(), torch.zeros(6, 3, dtype=torch.float64)
    with compiled_step(model, F.mse_loss, 3, capture="autograd", timeout=60) as step:
        fails, narrow = asking((1, 1, 1)), asking((1, 1, 1))
        fails[4, 1], narrow[4, 1] = 5, 4
        step(asking((1, 1, 1)), target=y)
        for x, text in (
            (asking((1, 2, 1)), r"cpu:0 came to mirrorc.all_gather at \S+:\d+, and cpu:1 to mirrorc.all_reduce"),
            (fails, r"cpu:2.*ValueError: an example is wrong"),
            (narrow, r"is given different types on two replicas"),
        ):
            with unchanged(model), pytest.raises(mirrorc.ExecutionError, match=text):
                step(x, target=y)
        expected = F.mse_loss(model(asking((2, 2, 2))), y).item()
        assert step(asking((2, 2, 2)), target=y).item() == pytest.approx(expected, rel=1e-12)


def test_more_exchanges_than_the_others_make_are_an_error() -> None:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = mirrorc.all_reduce(outputs.sum())
        return (outputs**2).mean() + (total if bool(target.sum() == 0) else total + mirrorc.all_reduce(outputs.mean()))

    model, x, y = net(), doubles(6, 5), torch.zeros(6, 3, dtype=torch.float64)
    with compiled_step(model, loss, capture="autograd", timeout=60) as step:
        step(x, target=y)
        y[5, 0] = 1.0
        with unchanged(model), pytest.raises(mirrorc.ExecutionError, match="came to the end of its forward, and cpu:1"):
            step(x, target=y)
        step(x, target=y * 0)


def test_an_exchange_that_was_not_there_in_first_runs_is_refused() -> None:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (mirrorc.all_reduce(outputs) if bool(target.sum() > 0) else outputs).mean()

    model, x = net(), doubles(6, 5)
    with compiled_step(model, loss, capture="autograd") as step:
        step(x, target=torch.zeros(6))
        with unchanged(model), pytest.raises(mirrorc.MirrorcError, match="and did not when it was captured"):
            step(x, target=torch.ones(6))


@pytest.mark.slow
def test_an_interrupt_wakes_a_replica_that_waits_for_another() -> None:
    woken = threading.Event()

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if bool(target.sum() > 0):
            os.kill(os.getpid(), signal.SIGINT)
            assert woken.wait(60)
        try:
            return outputs.mean() * mirrorc.all_reduce(outputs.detach().mean())
        finally:
            woken.set()

    model, x, target = net(), doubles(6, 5), torch.zeros(6)
    with compiled_step(model, loss, capture="autograd", timeout=60) as step:
        step(x, target=target)
        woken.clear()
        target[5] = 1.0
        with unchanged(model), pytest.raises(KeyboardInterrupt):
            step(x, target=target)
        step(x, target=target * 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"backend": "inductor"}, {"buckets": ByBytes(1e-4, 1e-4), "link": "copy"}], ids=str
)
def test_checkpoints_and_options_mean_the_same(options: dict[str, Any]) -> None:
    """A checkpoint that backward computes anew asks anew, on all replicas."""

    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return checkpoint(reduced_loss, outputs, target, use_reentrant=False)

    with Twins(net(), loss_fn=loss, capture="autograd", tolerance=TOLERANCE, **options) as pair:
        for _ in range(3):
            pair.train(doubles(7, 5), target=doubles(7, 3))


def test_several_workers_are_refused() -> None:
    model, x = Draws(), doubles(8, 5)
    compiler, sgd_of_model = mirrorc.Compiler(capture="autograd"), sgd(model.parameters())
    options: dict[str, Any] = {"optimizer": sgd_of_model, "loss_fn": F.mse_loss, "compiler": compiler}
    with pytest.raises(mirrorc.CaptureError, match="as plain PyTorch, which several workers cannot do yet"):
        mirrorc.plan(model, (x, x[:, :3]), world=mirrorc.World(2), **options)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.calls = nn.Linear(5, 3).double(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(x) + mirrorc.all_reduce(x.mean()) * self.calls


class Norm(nn.SyncBatchNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "as plain PyTorch, and its shards are run in microbatches": (Draws, {"microbatches": 2}),
    "asks for values of all replicas as plain PyTorch, and changes Python state": (Counts, {}),
    "has a SyncBatchNorm with a forward of its own": (lambda: nn.Sequential(nn.Linear(5, 3), Norm(3)).double(), {}),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_exchanged_is_refused(text: str) -> None:
    make, options = REFUSED[text]
    model, x = make(), doubles(8, 5)
    with (
        compiled_step(model, F.mse_loss, capture="autograd", **options) as step,
        unchanged(model),
        pytest.raises(mirrorc.CaptureError, match=text),
    ):
        step(x, target=x[:, :3])


def test_a_buffer_that_some_replicas_would_not_write_is_refused() -> None:
    model = Centered()
    with (
        compiled_step(model, devices=3, capture="autograd") as step,
        unchanged(model),
        pytest.raises(mirrorc.CaptureError, match="'center' for a batch of fewer examples than devices"),
    ):
        step(doubles(2, 5), target=doubles(2, 3))
