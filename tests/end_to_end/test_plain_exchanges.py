"""Models and losses that run as plain PyTorch and ask all replicas for values train as one device does on the whole batch."""

import math
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from references import assert_same_parameters, refused, unchanged
from selections import exhaustive, slow
from small_modules import Parts
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import Twins, compiled_step, sgd

import mirrorc
from mirrorc.packing import ByBytes
from mirrorc.runtime.state.shares import pieces

pytestmark = pytest.mark.fast

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


class Centered(Parts):
    """As of DINO: the targets' running mean over the whole batch is taken from each target."""

    def __init__(self) -> None:
        super().__init__(student=net())
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


class Draws(Parts):
    """Draws before and after an exchange, of which each lets other replicas draw."""

    def __init__(self) -> None:
        super().__init__(last=nn.Linear(5, 3).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.last(x) + 0.0 * torch.rand(len(x), 1)
        return h * mirrorc.all_gather(h).mean() + 0.0 * F.dropout(h)


@pytest.mark.slow
def test_replicas_that_draw_wait_for_each_other() -> None:
    with Twins(Draws(), loss_fn=F.mse_loss, devices=3, capture="autograd", tolerance=TOLERANCE) as pair:
        for size in (7, 2):
            pair.train(doubles(size, 5), target=doubles(size, 3))


class Asks(Parts):
    """Asks as often as the first example of the shard says, and may fail afterwards."""

    def __init__(self) -> None:
        super().__init__(last=nn.Linear(5, 3).double())

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


class Counts(Parts):
    def __init__(self) -> None:
        super().__init__(last=nn.Linear(5, 3).double(), calls=0)

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
        refused(mirrorc.CaptureError, text, model),
    ):
        step(x, target=x[:, :3])


def test_a_buffer_that_some_replicas_would_not_write_is_refused() -> None:
    model = Centered()
    with (
        compiled_step(model, devices=3, capture="autograd") as step,
        refused(mirrorc.CaptureError, "'center' for a batch of fewer examples than devices", model),
    ):
        step(doubles(2, 5), target=doubles(2, 3))


# Of a model with embedding tables, options of a step do what one device does, though only a step's rows are looked at.


NUM_ROWS, WIDTH = 3000, 50


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_ROWS, WIDTH)
        self.places = nn.Embedding(NUM_ROWS + 7, WIDTH, padding_idx=3)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.head((self.words(indices) * self.places(indices)).sum(1))


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options with a scaler of their own."""
    return options | ({"scaler": torch.amp.GradScaler("cpu", options["scaler"])} if "scaler" in options else {})


def batches(dtype: torch.dtype, bad: float | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    for i, size in enumerate((5, 8, 5, 8, 5)):
        indices = torch.randint(0, NUM_ROWS, (size, 4))
        indices[:, 0], indices[0, :2], indices[-1, 2] = 17, 3, NUM_ROWS - 1
        target = torch.randn(size, 2, dtype=dtype)
        if i == 2 and bad is not None:
            target[size // 2, 1] = bad
        yield indices, target


def trained_on_one_device(
    net: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Any], bad: float | None, dtype: torch.dtype
) -> list[torch.Tensor]:
    norms, scaler = [], given.get("scaler")
    for x, target in batches(dtype, bad):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), target)
        (loss if scaler is None else scaler.scale(loss)).backward()
        is_finite = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in net.parameters())
        if scaler is not None:
            scaler.unscale_(optimizer)
        if "clip_grad_norm" in given:
            bound = given["clip_grad_norm"]
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), bound.max_norm, bound.norm_type))
        if "clip_grad_value" in given:
            nn.utils.clip_grad_value_(net.parameters(), given["clip_grad_value"])
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif is_finite or "check_finite" not in given:
            optimizer.step()
    return norms


@pytest.mark.parametrize(
    ("options", "bad"),
    [
        ({"clip_grad_norm": mirrorc.ClipGradNorm(1e-3, 1.0), "clip_grad_value": 1e-5}, None),
        ({"clip_grad_norm": mirrorc.ClipGradNorm(1e-3, math.inf), "check_finite": "skip"}, math.nan),
        ({"scaler": 2.0**6, "clip_grad_norm": mirrorc.ClipGradNorm(1e-2)}, math.nan),
        *slow(
            ({"clip_grad_norm": mirrorc.ClipGradNorm(1e-3)}, None),
            ({"clip_grad_value": 1e-3}, None),
            ({"check_finite": "skip"}, math.nan),
            ({"scaler": 2.0**6}, math.inf),
        ),
        *exhaustive(
            ({"clip_grad_norm": mirrorc.ClipGradNorm(1e6)}, None),
            ({"clip_grad_norm": mirrorc.ClipGradNorm(1e-3), "clip_grad_value": 1e-5}, None),
            ({"clip_grad_norm": mirrorc.ClipGradNorm(1e-3, 3.0)}, None),
            ({"clip_grad_value": 1e-3, "check_finite": "skip"}, math.inf),
            ({"scaler": 3.0, "clip_grad_value": 1e-3}, math.nan),
        ),
    ],
)
@pytest.mark.parametrize(
    ("num_devices", "dtype"),
    [
        (2, torch.float64),
        *slow((3, torch.float32)),
        *exhaustive((1, torch.float64), (3, torch.float64), (2, torch.float32), (1, torch.float32)),
    ],
)
def test_steps_are_those_of_one_device(
    options: dict[str, Any], bad: float | None, num_devices: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
    norms = []
    with Twins(Tables().to(dtype), make, F.mse_loss, num_devices, **given(options)) as pair:
        for x, target in batches(dtype, bad):
            pair.step(x, target=target)
            norms += [pair.step.grad_norm] if "clip_grad_norm" in options else []
        assert pair.step.num_skipped == (bad is not None)
        expected = trained_on_one_device(pair.twin, pair.twin_optimizer, given(options), bad, dtype)
        tolerance = 1e-12 if dtype == torch.float64 else 1e-5
        for one, other in zip(norms, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=0.0, equal_nan=True, check_dtype=False)
        assert_same_parameters(pair.model, pair.twin, tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_norm": 1e-3},
        {"scaler": 2.0**10},
        *slow(
            ({"clip_grad_value": 1e-3},),
            ({"clip_grad_norm": 1e6},),
            ({"clip_grad_norm": mirrorc.ClipGradNorm(1e-3, math.inf)},),
            ({"check_finite": True},),
        ),
    ],
)
def test_no_share_of_a_table_is_looked_at_or_changed_as_a_whole(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a fused kernel write a scaled gradient back: what is behind the rows of a step stays as it is."""
    parts: list[int] = []
    visit = pieces.Visit.__call__

    def noting(one: pieces.Visit, part: torch.Tensor) -> None:
        parts.append(part.numel())
        visit(one, part)

    monkeypatch.setattr(pieces.Visit, "__call__", noting)
    net = Tables()
    divided: list[object] = []
    monkeypatch.setattr(
        mirrorc.runtime.state.optimizers.flat_optimizer,
        "dividing_gradients",
        lambda *args: divided.append(args) or pytest.fail("it writes the gradient"),
    )
    make = partial(torch.optim.AdamW, fused=True)
    with compiled_step(net, F.mse_loss, optimizer=make, **given(options)) as step:
        for x, target in batches(torch.float32, None):
            step(x, target=target)
            parts.append(0)
    of_later_steps = parts[parts.index(0) :]
    assert max(of_later_steps) <= 2 * 8 * 4 * WIDTH
