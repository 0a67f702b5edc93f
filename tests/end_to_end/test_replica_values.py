"""Models and losses that ask all replicas for values train as one device does on the whole batch."""

from functools import partial
from typing import Any

import pytest
import torch
from references import unchanged
from small_modules import Parts, module_of
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc.packing import ByBytes, EqualPacks

SIZES = (11, 2, 11)  # uneven, and too small for all devices
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
NUM_DEVICES = [pytest.param(n, marks=[pytest.mark.slow] if n in (1, 2, 4) else []) for n in (1, 2, 3, 4)]


class Normalized(Parts):
    def __init__(self) -> None:
        super().__init__(first=nn.Linear(5, 6), last=nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        count = mirrorc.all_reduce(torch.full((), float(len(h)), dtype=h.dtype))
        mean = mirrorc.all_reduce(h.sum(0)) / count
        variance = mirrorc.all_reduce(((h - mean) ** 2).sum(0)) / count
        return self.last(torch.tanh((h - mean) / (variance + 1e-3).sqrt()))


def coupled_loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    count = mirrorc.all_reduce(torch.full((), float(len(outputs)), dtype=outputs.dtype))
    mean = mirrorc.all_reduce(outputs.sum(0)) / count
    return F.mse_loss(outputs, target) + (mean**2).sum() + F.mse_loss(mean.expand_as(outputs), target)


def check(model: nn.Module, loss_fn: Any, num_devices: int = 3, sizes: tuple[int, ...] = SIZES, **options: Any) -> None:
    """Clips as asked in plain PyTorch, too."""
    with Twins(model.double(), momentum, loss_fn, num_devices, tolerance=1e-12, **options) as pair:
        if bound := options.get("clip_grad_norm"):
            parameters = [*pair.twin.parameters()]
            pair.twin_optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(parameters, bound) and None)
        for size in sizes:
            x, target = (torch.randn(size, width, dtype=torch.float64) for width in (5, 3))
            pair.train(x, target=target)
        torch.testing.assert_close(pair.model.state_dict(), pair.twin.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_values_of_the_whole_batch_train_as_on_one_device(num_devices: int) -> None:
    check(Normalized(), coupled_loss, num_devices)


def contrastive_loss(outputs: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """Each example's two embeddings belong together, among those of the whole batch."""
    one, other = outputs
    logits = [own @ mirrorc.all_gather(every).T / 0.1 for own, every in ((one, other), (other, one))]
    together = (one * other).sum(1) / 0.1
    return (sum(row.logsumexp(1) for row in logits) / 2 - together).mean() + 0.0 * target.sum()


def labelled_loss(outputs: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    """The same with labels, which are places in the whole batch: behind those of the replicas before."""
    one, other = outputs
    sizes = mirrorc.all_gather(torch.full((1,), len(one)))
    before = torch.where(torch.arange(len(sizes)) < mirrorc.replica_id(), sizes, 0).sum()
    labels = before + torch.arange(len(one))
    return F.cross_entropy(one @ mirrorc.all_gather(torch.cat([other, other], 1)).chunk(2, 1)[0].T / 0.1, labels)


@pytest.mark.parametrize("loss", [contrastive_loss, labelled_loss])
@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_contrastive_losses_over_the_whole_batch(num_devices: int, loss: Any) -> None:
    check(
        module_of(
            lambda self, x: (F.normalize(self.one(x), dim=1), F.normalize(self.other(x.flip(1)), dim=1)),
            one=nn.Linear(5, 6),
            other=nn.Linear(5, 6),
        ),
        loss,
        num_devices,
    )


class Convolutions(nn.Module):
    def __init__(self, *, affine: bool = True, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 2, 2)
        self.norm = nn.BatchNorm1d(2, affine=affine, momentum=momentum)
        self.last = nn.Linear(8, 3)
        self.again = nn.BatchNorm1d(3, affine=affine, track_running_stats=affine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.last(torch.tanh(self.norm(self.first(x[:, None]))).flatten(1)))


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
@pytest.mark.parametrize("options", [{}, {"affine": False, "momentum": None}])
@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_synchronized_statistics_are_those_of_the_whole_batch(
    num_devices: int, options: dict[str, Any], capture: str
) -> None:
    check(nn.SyncBatchNorm.convert_sync_batchnorm(Convolutions(**options)), F.mse_loss, num_devices, capture=capture)


def reduced_loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mean over the whole batch that each replica makes by itself, so that backward begins with a meeting."""
    sums = torch.stack([F.mse_loss(outputs, target, reduction="sum") / 3, outputs.new_tensor(float(len(outputs)))])
    total, count = mirrorc.all_reduce(sums).unbind()
    return total / count


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_options_of_a_step_mean_the_same(backend: str) -> None:
    options = {"backend": backend, "clip_grad_norm": 0.5, "buckets": ByBytes(1e-4, 1e-5)}
    check(nn.Sequential(Normalized(), nn.SyncBatchNorm(3)), reduced_loss, sizes=(7, 7), **options)


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_evaluations_and_calls_that_accumulate(capture: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(7, 5).double(), torch.randn(7, 3).double()
    with Twins(Normalized().double(), loss_fn=coupled_loss, devices=3, capture=capture, tolerance=1e-12) as pair:
        step, plain = pair.step, pair.twin
        torch.testing.assert_close(step.evaluate(x, target=y), coupled_loss(plain(x), y).detach())
        torch.testing.assert_close(step.evaluate(x[:2], target=y[:2]), coupled_loss(plain(x[:2]), y[:2]).detach())
        step.accumulate(x[:4], target=y[:4])
        step(x[4:], target=y[4:])
        pair.backward(x[:4], target=y[:4], loss_scale=4 / 7)
        pair.backward(x[4:], target=y[4:], loss_scale=3 / 7)
        pair.update()
        pair.check()


def test_numbers_of_replicas() -> None:
    class Numbered(Parts):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            number = mirrorc.replica_id().expand(len(x), 1)
            return self.weight * x, number, mirrorc.all_gather(number) + 10 * mirrorc.num_replicas()

    def first(outputs: Any, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs[0], target)

    model = Numbered(weight=nn.Parameter(torch.ones(()).double()))
    assert [part.tolist() for part in model(torch.ones(2, 1))[1:]] == [[[0], [0]], [[10], [10]]], "alone, there is one"
    x = torch.randn(5, 1).double()
    with compiled_step(model, first, 3, return_outputs=True) as step:
        _, (_, numbers, every) = step(x, target=x)
        assert numbers.flatten().tolist() == [0, 0, 1, 1, 2]
        assert [own.flatten().tolist() for own in every.values] == [[30, 30, 31, 31, 32]] * 3
        _, (_, numbers, every) = step(x[:2], target=x[:2])
        assert numbers.flatten().tolist() == [0, 1]
        assert [own.flatten().tolist() for own in every.values] == [[20, 21]] * 2


@pytest.mark.fast
def test_a_replica_that_fails_wakes_those_that_wait_for_it() -> None:
    class Checked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._assert_async((x < 100).all(), "an example is too large")
            return super().forward(x) + mirrorc.all_reduce(super().forward(x).sum(0))

    model, x = Checked(5, 3).double(), torch.randn(6, 5).double()
    with compiled_step(model, F.mse_loss, 3, timeout=60) as step:
        large = x.clone()
        large[-1] = 1000.0
        for _ in range(2):
            with unchanged(model), pytest.raises(mirrorc.ExecutionError, match=r"cpu:2.*an example is too large"):
                step(large, target=x[:, :3])
        expected = F.mse_loss(model(x), x[:, :3]).item()
        assert step(x, target=x[:, :3]).item() == pytest.approx(expected, rel=1e-12)


def test_one_value_per_channel_has_no_statistics() -> None:
    model, x = nn.Sequential(nn.Linear(5, 3), nn.SyncBatchNorm(3)).double(), torch.randn(2, 5).double()
    with compiled_step(model, F.mse_loss) as step:
        step(x, target=x[:, :3])
        with pytest.raises(mirrorc.ExecutionError, match="SyncBatchNorm in train mode needs more than one value per"):
            step(x[:1], target=x[:1, :3])
        model.eval()
        expected = F.mse_loss(model(x[:1]), x[:1, :3]).item()
        assert step(x[:1], target=x[:1, :3]).item() == pytest.approx(expected, rel=1e-12)


def test_statistics_are_the_same_on_all_replicas() -> None:
    model, x = nn.Sequential(nn.Linear(5, 3), nn.SyncBatchNorm(3)).double(), torch.randn(7, 5).double()
    with compiled_step(model, F.mse_loss, 3) as step:
        for size in (7, 2, 7):
            step(x[:size], target=x[:size, :3])
            for name, shown in model[1].named_buffers():
                for own in step.variables[f"1.{name}"].values:
                    assert torch.equal(own, shown), (size, name)
        assert model[1].num_batches_tracked == 3


OTHERS: list[dict[str, Any]] = [
    {"buckets": EqualPacks(3)},
    {"algorithm": "ring", "link": "copy"},
    {"placement": "central"},
    {"exact_order": True, "check_finite": True, "check_replicas_every": 1},
    {"disable": ["share-parameters"], "link": "copy"},
]


@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_other_options_mean_the_same(options: dict[str, Any]) -> None:
    check(nn.Sequential(Normalized(), nn.SyncBatchNorm(3)), coupled_loss, sizes=(7, 2), **options)


def test_scalers_and_autocast() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.SyncBatchNorm(6), nn.Linear(6, 3))
    x, y = torch.randn(7, 5), torch.randn(7, 3)
    loss_fn = lambda output, target: F.mse_loss(output.float(), target)  # noqa: E731
    options: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu"), "autocast": torch.bfloat16}
    with Twins(model, loss_fn=loss_fn, devices=3, **options) as pair:
        with torch.autocast("cpu", torch.bfloat16):
            expected = pair.plain(x, target=y)
        torch.testing.assert_close(pair.step(x, target=y), expected, rtol=0.02, atol=0.02)
        torch.testing.assert_close([*model.parameters()], [*pair.twin.parameters()], rtol=0.05, atol=0.02)


class Centered(Parts):
    """Takes the running mean of all batches from what it computes, as DINO does."""

    def __init__(self) -> None:
        super().__init__(layer=nn.Linear(5, 3).double())
        self.register_buffer("center", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, count = self.layer(x), mirrorc.all_reduce(x.new_ones(len(x)).sum())
        total = mirrorc.all_reduce(h.detach().sum(0))
        shifted = (h - self.center).tanh()
        self.center.mul_(0.9).add_(total / count * 0.1)
        return shifted


@pytest.mark.fast
@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_replica_without_examples_takes_over_a_buffer_of_the_whole_batch(num_devices: int) -> None:
    torch.manual_seed(0)
    with Twins(Centered(), loss_fn=F.mse_loss, devices=num_devices, capture="dynamo", tolerance=1e-12) as pair:
        for size in (6, num_devices - 1, 7, 1, 6):
            pair.train(torch.randn(size, 5, dtype=torch.float64), target=torch.randn(size, 3, dtype=torch.float64))


class Annealed(Parts):
    """Has a weight and a factor that each call advances, whatever its examples are."""

    def __init__(self) -> None:
        super().__init__(layer=nn.Linear(5, 3).double(), momentum=0.9)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scale.mul_(self.momentum).add_(self.layer.weight.detach().norm() * 0.1)
        return self.layer(x) * self.scale / self.calls


@pytest.mark.fast
@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_replica_without_examples_counts_as_the_others_do(capture: str, num_devices: int) -> None:
    torch.manual_seed(0)
    with Twins(Annealed(), loss_fn=F.mse_loss, devices=num_devices, capture=capture, tolerance=1e-12) as pair:
        for size in (6, 2, 7, 1, 6):
            pair.train(torch.randn(size, 5, dtype=torch.float64), target=torch.randn(size, 3, dtype=torch.float64))
            pair.model.momentum *= 0.9  # a number that changes is an argument of the program
            pair.twin.momentum *= 0.9


@pytest.mark.fast
def test_a_replica_without_examples_keeps_statistics_of_its_own() -> None:
    """What replicas have in common they keep in common; statistics of examples differ after the first full batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    with compiled_step(model, F.mse_loss, 2) as step:
        step(torch.randn(8, 5), torch.randn(8, 3))
        before = [value.clone() for value in step.variables["1.running_mean"].values]
        step(torch.randn(2, 5), torch.randn(2, 3))
        after, counts = (step.variables[f"1.{name}"].values for name in ("running_mean", "num_batches_tracked"))
        assert not torch.equal(*before) and torch.equal(after[1], before[1]) and not torch.equal(after[0], before[0])
        assert [int(count) for count in counts] == [2, 2], "all replicas had counted alike"


@pytest.mark.fast
def test_a_value_of_the_batch_and_a_parameter_need_no_region() -> None:
    """What is asked for may be an argument or a variable itself, and a result may be an output, the loss or a gradient."""

    def loss(outputs: Any, target: torch.Tensor) -> torch.Tensor:
        return (outputs[0] ** 2).sum()

    model, x = (
        module_of(
            lambda self, x: (
                mirrorc.all_gather(x).mean(0) * mirrorc.all_reduce(self.weight, "mean"),
                mirrorc.all_gather(x),
            ),
            weight=nn.Parameter(torch.ones(5).double()),
        ),
        torch.randn(7, 5).double(),
    )
    with compiled_step(model, loss, 3, return_outputs=True) as step:
        found, outputs = step(x, target=x)
    mean = x.mean(0)
    torch.testing.assert_close(found, (mean**2).sum())
    torch.testing.assert_close(model.weight.detach(), 1 - 0.2 * mean**2)
    assert all(torch.equal(own, x) for own in outputs[1].values)
