"""A run that is saved and loaded goes on as one that was not interrupted, bit for bit."""

import copy
import io
import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from deep import Deep
from references import Trained, assert_same_bits, assert_trains_alike, train_mirrored
from selections import exhaustive, slow
from torch import nn
from torch.nn import functional as F
from twins import batches_of, compiled_step

import mirrorc
from mirrorc.checkpoints import checkpoint
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes

pytestmark = pytest.mark.fast


class RunningNorm(nn.Module):
    """Normalizes by statistics that forward updates first, so that a replica's own values decide its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.var.mul_(0.9).add_(x.var(0), alpha=0.1)
        return self.net((x - self.mean) * (self.var + 1e-5).rsqrt())


class Run:
    """A model with its optimizer and its step."""

    def __init__(self, num_devices: int, **options: Any) -> None:
        self.model = RunningNorm()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        options = {"loss_fn": F.cross_entropy, "backend": "eager", **options}
        self.step = mirrorc.compile(self.model, num_devices, optimizer=self.optimizer, **grouped(options))

    def train(self, *numbers: int, size: int = 16) -> list[float]:
        """The losses of the batches of these numbers."""
        losses = []
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(size, 6, generator=generator) * torch.arange(1, size + 1)[:, None]
            losses.append(self.step(x, target=torch.randint(3, (size,), generator=generator)).item())
        return losses

    def save(self) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(self.step.state_dict(), file)
        file.seek(0)
        state: dict[str, Any] = torch.load(file, weights_only=True)
        return state

    def bits(self) -> list[torch.Tensor]:
        replicas = [value for variable in self.step.variables.values() for value in variable.values]
        return [value.clone() for value in (*self.model.state_dict().values(), *replicas)]


def test_a_run_that_resumes_with_the_last_batch_has_the_programs_of_one_in_one_go() -> None:
    whole, resumed = Run(2), Run(2)
    with whole.step, resumed.step:
        whole.train(0, 1)
        whole.train(2, size=10)
        resumed.step.load_state_dict(whole.save())
        for run in (whole, resumed):
            run.train(3, size=10)
            run.train(4, 5)
            types = [program.to_text().count("s0, 6") > 0 for program in run.step.programs]
            assert sorted(types) == [False, True]
        assert "f32[8, 6]" in resumed.step.program.to_text()  # that of the full batches
        torch.testing.assert_close(resumed.bits(), whole.bits(), rtol=0, atol=0)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("trains_before", [False, True], ids=["new step", "step that has run"])
def test_a_resumed_run_has_the_bits_of_one_in_one_go(num_devices: int, trains_before: bool) -> None:
    whole, resumed = Run(num_devices), Run(num_devices)
    with whole.step, resumed.step, warnings.catch_warnings():
        warnings.simplefilter("error")
        whole.train(0, 1, 2)
        state = whole.save()
        assert bool(state["replica_buffers"]) == (num_devices > 1)
        draws = random_draws()
        expected = whole.train(3, 4)
        if trains_before:
            resumed.train(7, 8)
        random_draws()
        resumed.step.load_state_dict(state)
        assert random_draws() == draws
        resumed.step.load_state_dict(state)
        assert resumed.train(3, 4) == expected
        assert all(map(torch.equal, resumed.bits(), whole.bits()))


def random_draws() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


def test_a_loaded_state_is_copied() -> None:
    whole, resumed = Run(2), Run(2)
    with whole.step, resumed.step:
        whole.train(0, 1)
        state = whole.save()
        resumed.step.load_state_dict(state)
        for buffer in state["replica_buffers"].values():
            for value in buffer["replicas"]:
                value.zero_()
        assert resumed.train(2) == whole.train(2)


class Pair:
    """Two steps with an optimizer each over one model."""

    def __init__(self) -> None:
        self.model = RunningNorm()
        optimizers = [torch.optim.SGD(self.model.net[layer].parameters(), lr=0.1) for layer in (0, 3)]
        self.steps = [compiled_step(self.model, F.cross_entropy, optimizer=optimizer) for optimizer in optimizers]

    def train(self) -> list[float]:
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(8, 6, generator=generator) * torch.arange(1, 9)[:, None]
        return [step(x, target=torch.arange(8) % 3).item() for step in self.steps]


def test_two_steps_over_one_model_resume_without_a_warning() -> None:
    whole, resumed = Pair(), Pair()
    whole.train()
    states = copy.deepcopy([step.state_dict() for step in whole.steps])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, state in zip(resumed.steps, states, strict=True):
            step.load_state_dict(state)
        for _ in range(2):
            assert resumed.train() == whole.train()
    for step in (*whole.steps, *resumed.steps):
        step.close()


def test_loaded_buffers_wait_for_a_training_call() -> None:
    whole, resumed = Run(2), Run(2)
    with whole.step, resumed.step:
        whole.train(0, 1)
        state = whole.save()
        resumed.step.load_state_dict(state)
        x, y = torch.ones(4, 6), torch.zeros(4, dtype=torch.int64)
        for run in (whole, resumed):
            run.model.eval()
        assert torch.equal(resumed.step.evaluate(x, target=y), whole.step.evaluate(x, target=y))
        again = resumed.step.state_dict()["replica_buffers"]
        assert again.keys() == state["replica_buffers"].keys()
        for run in (whole, resumed):
            run.model.train()
        assert resumed.train(2) == whole.train(2)


def test_buffers_of_another_model_are_left_aside_with_a_warning() -> None:
    whole, resumed = Run(2), Run(2)
    with whole.step, resumed.step:
        whole.train(0)
        resumed.step.load_state_dict(whole.save())
        resumed.model.load_state_dict(Run(1).model.state_dict())
        with pytest.warns(
            UserWarning, match="the model's buffers 'mean', 'var', .* differ from those of the loaded checkpoint"
        ):
            resumed.train(1)
        assert not torch.equal(*resumed.step.variables["mean"].values)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed.train(2)


@pytest.mark.parametrize(("num_before", "number"), [(2, 3), (3, 1), (1, 4)])
def test_a_state_goes_on_with_other_numbers_of_devices(num_before: int, number: int) -> None:
    whole, resumed = Run(num_before), Run(number)
    with whole.step, resumed.step:
        whole.train(0, 1)
        state = whole.save()
        if num_before > 1:
            with pytest.warns(UserWarning, match="all replicas begin with the model's buffers"):
                resumed.step.load_state_dict(state)
        else:
            resumed.step.load_state_dict(state)
        for name, value in whole.model.state_dict().items():
            assert torch.equal(resumed.model.state_dict()[name], value), name
        for one, other in zip(*(run.optimizer.state_dict()["state"].values() for run in (whole, resumed)), strict=True):
            assert all(torch.equal(one[key], other[key]) for key in one)
        resumed.train(2)


@pytest.mark.parametrize(
    ("buffers", "error", "message"),
    [
        ([1], TypeError, r"MC7002: replica_buffers in the state of a step is a list"),
        ({"mean": torch.zeros(6)}, TypeError, "'mean' in replica_buffers of a step's state is no such buffer"),
        ({"mean": {"model": 1, "replicas": []}}, TypeError, "is no such buffer\n  fix:  step.load_state_dict"),
        (
            {"mean": {"model": torch.ones(6), "replicas": [torch.ones(6)]}},
            ValueError,
            "for 1 replica, and this step has 2",
        ),
        (
            {"x": {"model": torch.ones(6), "replicas": [torch.ones(6)] * 2}},
            ValueError,
            "'x' .* is no buffer of this model",
        ),
        ({"mean": {"model": torch.ones(6), "replicas": [torch.ones(5)] * 2}}, ValueError, r"another shape .*, \[6\]"),
    ],
)
def test_wrong_buffers_are_refused(buffers: Any, error: type[Exception], message: str) -> None:
    run = Run(2)
    with run.step:
        with pytest.raises(error, match=message):
            run.step.load_state_dict({**run.step.state_dict(), "replica_buffers": buffers})
        run.train(0)


class Extra(nn.Module):
    """A buffer that the state_dict leaves out, and a loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count.add_(1)
        return self.layer(F.dropout(x, 0.3, self.training)) * (1 + 0.1 * self.count)


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output / self.temperature, target)


def made_of_extras(num_optimizers: int = 2) -> tuple[nn.Module, list[torch.optim.Optimizer], mirrorc.Step]:
    model, loss_fn = Extra(), Tempered()
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.Adam(loss_fn.parameters(), lr=0.1),
    ][:num_optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    options: Any = {"optimizer": optimizers, "loss_fn": loss_fn, "scaler": scaler, "backend": "eager"}
    return model, optimizers, mirrorc.compile(model, 2, **grouped(options))


def losses(step: mirrorc.Step, number: int) -> list[float]:
    return [step(torch.randn(6, 4), torch.arange(6) % 3).item() for _ in range(number)]


def test_buffers_loss_optimizers_scaler_and_dropout_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    _, _, whole = made_of_extras()
    _, _, resumed = made_of_extras()
    with whole, resumed:
        losses(whole, 3)
        mirrorc.save_checkpoint(whole, tmp_path / "one" / "last", epoch=3)
        expected = losses(whole, 3)
        torch.manual_seed(5)
        assert mirrorc.load_checkpoint(resumed, tmp_path / "one" / "last") == {"epoch": 3}
        assert losses(resumed, 3) == expected
        one, other = whole.state_dict(), resumed.state_dict()
        assert one["scaler"] == other["scaler"] and one["scaler"]["scale"] > 8
        assert torch.equal(one["loss_fn"]["temperature"], other["loss_fn"]["temperature"])
        assert one["other_buffers"].keys() == {"count"} and one["other_buffers"]["count"] == 6
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["last"]


def test_a_checkpoint_that_fails_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, step = made_of_extras()
    folder = tmp_path / "last"
    with step:
        losses(step, 1)
        mirrorc.save_checkpoint(step, folder, epoch=1)
        for name in ("write", "sync"):
            with monkeypatch.context() as patched:
                patched.setattr(checkpoint, name, full_disk)
                with pytest.raises(OSError, match="no space"):
                    mirrorc.save_checkpoint(step, folder, epoch=2)
            assert mirrorc.load_checkpoint(step, folder) == {"epoch": 1}
        folder.rename(tmp_path / ".last.old")  # as if the process had ended there
        assert mirrorc.load_checkpoint(step, folder) == {"epoch": 1}
        mirrorc.save_checkpoint(step, folder, epoch=3)
        assert mirrorc.load_checkpoint(step, folder) == {"epoch": 3}


def full_disk(*args: Any) -> None:
    raise OSError("no space")


def test_torch_reads_a_checkpoint(tmp_path: Path) -> None:
    model, _, step = made_of_extras()
    with step:
        mirrorc.save_checkpoint(step, tmp_path / "last")
    state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=tmp_path / "last", no_dist=True)
    assert all(torch.equal(value, state["model"][name]) for name, value in model.state_dict().items())


class Odd(nn.Module):
    """An optimizer's neighbour in a checkpoint whose load fails."""

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not today")


def test_nothing_is_changed_when_a_state_does_not_fit(tmp_path: Path) -> None:
    model, optimizers, step = made_of_extras()
    with step:
        losses(step, 2)
        before = copy.deepcopy(step.state_dict())
        mirrorc.save_checkpoint(step, tmp_path / "last", odd=Odd(), epoch=1)
        losses(step, 1)
        now = copy.deepcopy(step.state_dict())
        wrong = copy.deepcopy(before)
        wrong["optimizers"][1]["param_groups"].append({"params": [1]})
        cases: list[tuple[Any, type[Exception], str]] = [
            (3, TypeError, "MC7002: load_state_dict\\(\\) of a step was given a int"),
            ([3], TypeError, "one of the states is a int"),
            (
                {"model": 1},
                ValueError,
                "is no state of a step\n  why:  its keys are model; .*\n  fix:  step.load_state_dict",
            ),
            ({**before, "model": {}}, ValueError, "is of another model: .* lacks 'layer.weight' and 1 more"),
            ({**before, "loss_fn": {"temperature": torch.ones(2)}}, ValueError, r"has the shape \[2\] there, and \[\]"),
            ({**before, "other_buffers": {}}, ValueError, "lacks 'count'"),
            ({**before, "optimizers": before["optimizers"][:1]}, ValueError, "has 1 optimizers, and this step 2"),
            ({**before, "scaler": {}}, ValueError, "this step has a scaler and the state has none"),
            (wrong, ValueError, "group"),
        ]
        for state, error, message in cases:
            with pytest.raises(error, match=message):
                step.load_state_dict(state)
        with pytest.raises(ValueError, match="the checkpoint has no 'scheduler'\n  why:  beside the step it has epoch"):
            mirrorc.load_checkpoint(step, tmp_path / "last", scheduler=optimizers[0])
        with pytest.raises(RuntimeError, match="not today"):
            mirrorc.load_checkpoint(step, tmp_path / "last", odd=Odd())
        with pytest.raises(FileNotFoundError, match=r"has no checkpoint of mirrorc\.save_checkpoint"):
            mirrorc.load_checkpoint(step, tmp_path)
        with pytest.raises(ValueError, match=r"is no checkpoint\n  fix:  mirrorc\.save_checkpoint"):
            mirrorc.save_checkpoint(step, tmp_path)
        with pytest.raises(ValueError, match="'model' is a name of the step's own state"):
            mirrorc.save_checkpoint(step, tmp_path / "last", model=model)
        assert_same_tree(step.state_dict(), now)
        step.load_state_dict(before)
        assert_same_tree(step.state_dict(), before)


def assert_same_tree(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same_tree(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for value, counterpart in zip(one, other, strict=True):
            assert_same_tree(value, counterpart)
    else:
        assert one == other


def test_accumulated_gradients_have_no_place_in_a_checkpoint() -> None:
    run = Run(2)
    with run.step:
        run.step.accumulate(torch.randn(4, 6), target=torch.zeros(4, dtype=torch.int64))
        with pytest.raises(
            mirrorc.ExecutionError, match="a checkpoint has no place for them\n  fix:  call it after the step"
        ):
            run.step.state_dict()
        run.step.zero_grad()
        run.step.state_dict()


# Models with `torch.utils.checkpoint` train as those without, bit for bit, and take less memory.


ADAMW = partial(torch.optim.AdamW, lr=0.01)


def train(num_devices: int, **options: Any) -> list[Trained]:
    found = []
    for num_own in (2, 0):
        model, given = Deep(num_blocks=2, num_own=num_own), batches_of(7, 7, 7, classes=3)
        torch.manual_seed(1)
        found.append(train_mirrored(model, ADAMW, given, num_devices, F.cross_entropy, **options))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "options"),
    [
        (3, {"buckets": ByBytes(0.002, 0.002)}),
        (2, {"microbatches": 2}),
        (1, {}),
        (2, {}),
        (2, {"exact_order": True}),
        (2, {"clip_grad_norm": 0.1, "check_finite": True}),
    ],
)
def test_the_bits_are_those_without_checkpoints(num_devices: int, options: dict[str, Any]) -> None:
    assert_same_bits(*train(num_devices, **options))


@pytest.mark.parametrize("num_devices", [*slow((2,)), *exhaustive((1,), (3,))])
def test_compiled_steps_are_those_without_checkpoints(num_devices: int) -> None:
    one, other = train(num_devices, backend="inductor")
    assert one.losses == pytest.approx(other.losses, rel=1e-12)
    others = other.model.state_dict()
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(value, others[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_devices", [*slow((1,), (2,)), 3])
def test_training_is_that_of_one_device(num_devices: int) -> None:
    model = Deep(num_own=3, is_plain=True)
    assert_trains_alike(model, ADAMW, batches_of(7, 7, classes=3), num_devices, F.cross_entropy)


def activations(num_own: int, backend: str) -> int:
    (batch,) = batches_of(256, features=32, classes=3)
    with compiled_step(Deep(32, 4, num_own), F.cross_entropy, 1, backend=backend) as step:
        step.prepare(**batch)
        return step.memory().activations


@pytest.mark.parametrize("backend", ["eager", *slow(("inductor",))])
def test_checkpoints_save_memory(backend: str) -> None:
    """Of four blocks, one is there at a time."""
    assert activations(4, backend) < activations(0, backend) / 2


@pytest.mark.slow
def test_an_evaluation_is_that_of_the_model() -> None:
    model, (batch,) = Deep(num_own=3), batches_of(5, classes=3)
    with compiled_step(model, F.cross_entropy, optimizer=ADAMW) as step:
        step(**batch)
        model.eval()
        with torch.no_grad():
            expected = F.cross_entropy(model(batch["x"]), batch["target"])
        torch.testing.assert_close(step.evaluate(**batch), expected, rtol=1e-12, atol=0)
