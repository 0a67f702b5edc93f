"""Statistics that the user's forwards write between steps count, though no version tells; eval mode uses what is shown."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import selections
import torch
from references import assert_same_model, train_step, unchanged
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc.errors import CaptureError
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.variables import Role, Variable
from mirrorc.runtime.state.variables.variables import VariableStore


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("var", torch.ones(3))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(torch.tanh(self.norm(self.first(x))))
        return F.batch_norm(x, self.mean, self.var, training=self.training)


def batch(seed: int, size: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(size, n, dtype=torch.float64, generator=generator) * (1 + seed) for n in (4, 3))
    return {"x": x, "target": y}


def make() -> Normed:
    torch.manual_seed(0)
    return Normed()


SGD = partial(torch.optim.SGD, lr=0.05)


def compiled(model: nn.Module, devices: int = 2) -> mirrorc.Step:
    return compiled_step(model, F.mse_loss, devices, SGD)


def forward(model: Normed) -> None:
    model.train()
    with torch.no_grad():
        model(batch(7)["x"])


def functional_forward(model: Normed) -> None:
    F.batch_norm(batch(7)["target"], model.mean, model.var, training=True)


def functional_forward_of_a_module(model: Normed) -> None:
    x = batch(7)["x"].repeat(1, 2)[:, :6]
    F.batch_norm(x, model.norm.running_mean, model.norm.running_var, training=True)


def in_place(model: Normed) -> None:
    model.mean.add_(1.0)
    model.norm.running_var.data.mul_(2.0)


CHANGES = [forward, functional_forward, functional_forward_of_a_module, in_place]


def test_what_is_written_between_steps_goes_to_all_replicas() -> None:
    for change in CHANGES:
        model = make()
        with compiled(model, 3) as step:
            for seed in range(3):
                step(**batch(seed, size=9))
            shown = {name: value.clone() for name, value in model.named_buffers()}
            own = {name: [v.clone() for v in step.variables[name].values] for name in shown}
            change(model)
            written = {name for name, value in model.named_buffers() if not torch.equal(value, shown[name])}
            expected = {name: value.clone() for name, value in model.named_buffers()}
            assert written, change
            step._state.prepare_for(step.programs[-1])  # as the next step begins
            for name, variable in step.variables.items():
                if name in written:
                    assert all(torch.equal(value, expected[name]) for value in variable.values), (change, name)
                elif name in shown and change is not forward:
                    kept = zip(variable.values, own[name], strict=True)
                    is_sibling = name.startswith("norm.") and any(w.startswith("norm.") for w in written)
                    assert is_sibling or all(torch.equal(a, b) for a, b in kept), (change, name)


def test_training_goes_on_from_statistics_of_the_users_forward() -> None:
    """Between steps on one shard's worth of examples for each replica, as if each had trained alone."""
    for change in CHANGES:
        with Twins(make(), SGD, F.mse_loss) as pair:
            for seed in range(4):
                once = batch(seed)
                twice = {name: value.repeat(2, 1) for name, value in once.items()}  # equal shards
                assert pair.step(**twice).item() == pytest.approx(pair.plain(**once).item(), rel=1e-10)
                change(pair.model), change(pair.twin)
            assert_same_model(pair.model, pair.twin, 1e-10)


@pytest.mark.fast
def test_a_statistic_that_is_not_a_number_is_not_taken_for_written() -> None:
    model = make()
    with compiled(model) as step:
        step(**batch(0))
        values = step.variables["mean"].values
        values[0].fill_(float("nan"))
        values[1].fill_(1.0)
        step._state.finish()
        assert model.mean.isnan().all()
        step._state.prepare_for(step.programs[-1])
        assert step.variables["mean"].values[1].eq(1.0).all()


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "norm-only"])
def test_steps_in_eval_mode_use_what_the_model_shows(is_whole: bool) -> None:
    model = make()
    with compiled(model, 3) as step:
        for seed in range(3):
            step(**batch(seed, size=9))
        means = [value.clone() for value in step.variables["norm.running_mean"].values]
        assert not torch.equal(means[0], means[1])
        (model if is_whole else model.norm).eval()
        for seed in range(3):
            shown = copy.deepcopy(dict(model.norm.named_buffers()))
            twin = copy.deepcopy(model)
            loss = step(**batch(seed, size=9))
            if is_whole:
                expected = train_step(twin, SGD(twin.parameters()), batch(seed, size=9), F.mse_loss)
                assert loss.item() == pytest.approx(expected, rel=1e-10)
                assert_same_model(model, twin, 1e-10)
            assert all(torch.equal(value, shown[name]) for name, value in model.norm.named_buffers())
            model.norm.running_mean.add_(0.1)
        model.train()
        step(**batch(5, size=9))


def test_written_statistics_keep_their_bits_in_eval_mode_on_three_devices() -> None:
    """The mean of three equal numbers may be another number."""
    model = make()
    with compiled(model, 3) as step:
        step(**batch(0, size=9))
        model.norm.eval()
        model.norm.running_mean.copy_(torch.rand(6, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
        written = model.norm.running_mean.clone()
        for seed in range(2):
            step(**batch(seed, size=9))
            assert torch.equal(model.norm.running_mean, written)


@pytest.mark.fast
@pytest.mark.parametrize("forward", [lambda norm: norm(torch.randn(5, 2)), lambda norm: norm.running_mean.data.add_(0)])
def test_copies_in_other_memory_follow_the_counter_of_forwards(forward: Callable[[nn.Module], Any]) -> None:
    norm = nn.BatchNorm1d(2)
    devices: Any = [SimpleNamespace(torch_device=torch.device(name)) for name in ("cpu", "meta")]
    store = VariableStore(dict(norm.named_buffers()), devices)
    variable = Variable("running_mean", (2,), (1,), torch.float32, Role.BUFFER)
    program = Program(Stage.CAPTURED, (), {"running_mean": variable}, ())
    store.adopt(store.lay_out(program))
    copies = store.read_by(variable)
    assert [value.device.type for value in copies] == ["cpu", "meta"]
    assert not store.mirror_changes()
    norm.train()
    tracked, version = norm.num_batches_tracked.item(), copies[1]._version
    forward(norm)
    has_counted = norm.num_batches_tracked.item() != tracked
    assert not store.mirror_changes(), "it is written in place"
    assert store.read_by(variable)[1] is copies[1] and (copies[1]._version != version) == has_counted


# Buffers that forward or loss assigns: the model's buffer gets the value, as by ``copy_``.


class Centered(nn.Module):
    def __init__(self, assign: Callable[[Any, torch.Tensor], None], *, scales: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("center", torch.zeros(2))
        self.inner = nn.BatchNorm1d(2, affine=False)
        self.inner.register_buffer("last", torch.ones(2))
        self.assign, self.scales = assign, scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        scaled = h * self.center if self.scales else h  # backward needs the former value
        self.assign(self, h.detach().mean(0))
        return h - self.center + scaled


def mean(model: Any, value: torch.Tensor) -> None:
    model.center = model.center * 0.9 + value * 0.1


def entry(model: Any, value: torch.Tensor) -> None:
    model._buffers["center"] = model.center * 0.9 + value * 0.1


def registered(model: Any, value: torch.Tensor) -> None:
    model.register_buffer("center", model.center * 0.9 + value * 0.1)


def nested(model: Any, value: torch.Tensor) -> None:
    model.inner.last = model.inner.last * 0.9 + value
    model.center = model.inner.last.sin()


def several(model: Any, value: torch.Tensor) -> None:
    former = model.center
    model.center = model.center * 0.9 + value * 0.1
    model.center = model.center + former
    model.center.mul_(0.5)


def exchanged(model: Any, value: torch.Tensor) -> None:
    model.center, model.inner.last = model.inner.last, model.center + value


def constant(model: Any, value: torch.Tensor) -> None:
    model.center = torch.ones(2, dtype=torch.float64) / 4


def through_none(model: Any, value: torch.Tensor) -> None:
    model.center = None
    model.center = value * 0.5


WAYS = (mean, entry, registered, nested, several, exchanged, constant, through_none)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@pytest.mark.fast
@pytest.mark.parametrize(
    "assign", [mean, *selections.slow(*((way,) for way in WAYS if way is not mean))], ids=lambda way: way.__name__
)
@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_an_assigned_buffer_is_that_of_one_device(assign: Callable[..., None], capture: str) -> None:
    with Twins(Centered(assign).double(), loss_fn=loss_fn, devices=1, capture=capture) as pair:
        held = pair.model.center
        for _ in range(3):
            x, target = torch.randn(6, 3).double(), torch.randn(6, 2).double()
            torch.testing.assert_close(pair.step(x, target=target), pair.plain(x, target=target))
        pair.check()
        assert pair.model.center is held is pair.model.state_dict(keep_vars=True)["center"]
        torch.testing.assert_close(pair.model.state_dict(), pair.twin.state_dict(), rtol=1e-12, atol=1e-12)


def copied(model: Any, value: torch.Tensor) -> None:
    model.center.copy_(model.center * 0.9 + value * 0.1)


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
@pytest.mark.parametrize("options", [{"devices": 2}, {"devices": 3}, {"devices": 2, "microbatches": 2}], ids=str)
def test_replicas_assign_as_they_copy(capture: str, options: dict[str, Any]) -> None:
    states = []
    for assign in (mean, copied):
        torch.manual_seed(0)
        model = Centered(assign, scales=False).double()
        with compiled_step(model, loss_fn, capture=capture, **options) as step:
            for size in (8, 8, 7):
                step(torch.randn(size, 3).double(), target=torch.randn(size, 2).double())
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    torch.testing.assert_close(states[0], states[1], rtol=1e-12, atol=1e-12)


class CenteredLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = (output - target - self.center).square().mean()
        self.center = self.center * 0.9 + output.detach().mean(0) * 0.1
        return loss


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_a_loss_assigns_its_buffer(capture: str) -> None:
    loss, other = CenteredLoss().double(), CenteredLoss().double()
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    x, target = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    with compiled_step(model, loss, devices=1, capture=capture) as step:
        for _ in range(3):
            expected = other(model(x), target)
            torch.testing.assert_close(step(x, target=target), expected)
    torch.testing.assert_close(loss.center, other.center)


def of_another_dtype(model: Any, value: torch.Tensor) -> None:
    model.center = value.float()


def of_another_shape(model: Any, value: torch.Tensor) -> None:
    model.center = value[:1]


def with_a_graph(model: Any, value: torch.Tensor) -> None:
    model.center = model.layer.bias * 2


REFUSED = {of_another_dtype: r"f32\[2\]", of_another_shape: r"f64\[1\]", with_a_graph: "requires a gradient"}


@pytest.mark.parametrize("capture", ["auto", "dynamo", "autograd"])
@pytest.mark.parametrize("assign", REFUSED, ids=lambda way: way.__name__)
def test_a_tensor_of_another_kind_is_refused_in_a_sentence(assign: Callable[..., None], capture: str) -> None:
    model = Centered(assign).double()
    batch = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    with compiled_step(model, loss_fn, capture=capture) as step:
        with unchanged(model), pytest.raises(CaptureError, match=f"MC2304[^\\n]*{REFUSED[assign]}"):
            step(batch[0], target=batch[1])
        model.assign = mean
        step(batch[0], target=batch[1])


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_a_buffer_of_two_modules_is_not_assigned_in_one(capture: str) -> None:
    model = Centered(mean).double()
    model.inner.register_buffer("same", model.center)
    with compiled_step(model, loss_fn, capture=capture) as step, unchanged(model), pytest.raises(CaptureError):
        step(torch.randn(6, 3).double(), target=torch.randn(6, 2).double())
