"""Models, arguments and surroundings that are unusual: they train as on one device, or are refused in plain words."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from references import assert_same_model, assert_trains_alike, train_mirrored, train_on_one_device, unchanged
from selections import exhaustive
from small_modules import Parts, module_of
from tiny_models import make_mlp, mlp_batch
from torch import nn
from twins import MlpTwins, Twins, compiled_step

import mirrorc
from mirrorc import CaptureError, ExecutionError, MirrorcError
from mirrorc.errors import VerifyError

TOLERANCE = 1e-10
SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=0.1)


def compile_eager(model: nn.Module, devices: int = 2, make_optimizer: Any = SGD, **options: Any) -> mirrorc.Step:
    return compiled_step(model, devices=devices, optimizer=make_optimizer, **options)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# A loss that is a view of a parameter


class LossIsParameter(Parts):
    def __init__(self, give: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(weight=nn.Parameter(normal(2)), give=give)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.give(self.weight)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_loss_that_is_a_view_of_a_parameter_is_that_before_the_update(backend: str) -> None:
    for give in (
        lambda weight: weight[0],
        lambda weight: weight.view(2, 1)[1].squeeze(),
        lambda weight: weight.chunk(2)[0].squeeze(),
        lambda weight: weight.unbind()[1],
    ):
        for devices in (1, 2) if backend == "eager" else (2,):
            model = LossIsParameter(give)
            with compiled_step(model, devices=devices, optimizer=SGD, backend=backend) as step:
                for _ in range(2):
                    before = give(model.weight).detach().clone()
                    assert torch.equal(step(x=normal(4, 2)), before)
                    assert torch.allclose(give(model.weight), before - 0.1, rtol=TOLERANCE)


def test_the_verifier_refuses_to_return_a_view_of_what_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrorc.capture.dynamo.dynamo_front_end._copy_aliased_loss", lambda graph: None)
    for devices in (1, 2):
        said = "(?s)variables_are_written_after_reads .* weight is written on cpu:. before .* is returned"
        with (
            compile_eager(LossIsParameter(lambda weight: weight.unbind()[1]), devices) as step,
            pytest.raises(VerifyError, match=said),
        ):
            step(x=normal(4, 2))


# A step that timed out

RELEASE = threading.Event()
HELD = 100.0


@torch.library.custom_op("mirrorc_tests::hold_until_released", mutates_args=())
def hold_until_released(x: torch.Tensor) -> torch.Tensor:
    if x[0, 0] >= HELD:
        assert RELEASE.wait(30)
    return x.clone()


hold_until_released.register_fake(torch.empty_like)


@pytest.mark.parametrize("held_rows", [[0, 2], [2]], ids=["every-replica", "one-replica"])
@pytest.mark.parametrize("release_first", [True, False])
def test_after_a_timeout_no_call_gives_an_old_loss(held_rows: list[int], release_first: bool) -> None:
    RELEASE.clear()
    model = module_of(lambda self, x: self.layer(hold_until_released(x)).mean(), layer=nn.Linear(2, 1))
    good = torch.ones(4, 2)
    bad = good.clone()
    bad[held_rows] = HELD
    with compile_eager(model, make_optimizer=partial(SGD, lr=0.0), timeout=0.3) as step:
        try:
            step(good)
            with pytest.raises(MirrorcError):
                step(bad)
            if release_first:
                RELEASE.set()
            for scale in (2.0, 3.0, 4.0):
                expected = model.layer(good * scale).mean().item()
                try:
                    assert step(good * scale).item() == pytest.approx(expected)
                except ExecutionError as error:
                    assert re.search("compile.*anew|mirrorc.compile", str(error)), error
        finally:
            RELEASE.set()


# A forward that assigns state


class Assigns(Parts):
    def __init__(self, assign: Callable[[Assigns], None]) -> None:
        super().__init__(layer=nn.Linear(2, 1))
        self.register_buffer("average", torch.tensor(1.0))
        self.count = 0
        self._assign = assign

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._assign(self)
        return self.layer(x).mean()


def count(model: Assigns) -> None:
    model.count += 1


def write_into_the_buffer(model: Assigns) -> None:
    model.average.add_(1)


@pytest.mark.parametrize("devices", [2, 1])
def test_a_forward_that_assigns_state_is_refused(devices: int) -> None:
    model = Assigns(count)
    with compile_eager(model, devices, capture="dynamo") as step:
        for _ in range(2):
            with unchanged(model), pytest.raises(CaptureError) as caught:
                step(torch.ones(4, 2))
            assert re.search(r"sets an attribute of itself.*\n  at:   .*model\.count ", str(caught.value))
            assert re.search(r"\n  or:   .*self\.x\.copy_\(value\) in forward", str(caught.value))
    assert model.count == 0


@pytest.mark.fast
def test_a_forward_that_writes_into_a_buffer_trains() -> None:
    model = Assigns(write_into_the_buffer)
    with compile_eager(model) as step:
        for _ in range(3):
            step(torch.ones(4, 2))
    assert model.average == 4.0


# Layouts of parameters


def channels_last_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 2))
        return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("disabled", "backend"),
    [((), "eager"), (("share-parameters",), "eager"), ((), "inductor"), (("share-parameters",), "inductor")],
)
def test_a_channels_last_model(backend: str, disabled: tuple[str, ...]) -> None:
    model = channels_last_net()
    assert not model[0].weight.is_contiguous()
    batches = [
        {
            "input": normal(7, 3, 8, 8, seed=i).contiguous(memory_format=torch.channels_last),
            "target": torch.arange(7) % 2,
        }
        for i in range(3)
    ]
    options = {"backend": backend, "disable": disabled}
    assert_trains_alike(model, ADAM, batches, 2, F.cross_entropy, tolerance=1e-9, **options)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("disabled", [(), ("share-parameters",)], ids=["shared", "mirrored"])
def test_a_transposed_parameter(backend: str, disabled: tuple[str, ...]) -> None:
    model = module_of(lambda self, x: torch.tanh(x @ self.weight), weight=nn.Parameter(normal(5, 3).t()))
    assert not model.weight.is_contiguous()
    batches = [{"x": normal(8, 3, seed=i), "target": normal(8, 5, seed=10 + i)} for i in range(3)]
    options = {"backend": backend, "disable": disabled}
    assert_trains_alike(model, ADAM, batches, 2, F.mse_loss, tolerance=TOLERANCE, **options)


class HasEmptyParameter(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=dtype))
        self.after = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.before).mean() ** 2 * 0 + (x * self.before * self.after).mean() + self.empty.sum()


@pytest.mark.parametrize(
    ("devices", "backend"),
    [(3, "eager"), (1, "eager"), (2, "inductor"), *exhaustive((2, "eager"), (1, "inductor"), (3, "inductor"))],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["beside", "in-its-own-bucket"])
def test_a_parameter_without_elements(devices: int, dtype: torch.dtype, backend: str) -> None:
    model = HasEmptyParameter(dtype)
    batches = [{"x": normal(7, 2, seed=i)} for i in range(3)]
    mirrored = train_mirrored(model, ADAM, batches, devices, backend=backend)
    single = train_on_one_device(model, ADAM, batches)
    assert mirrored.losses == pytest.approx(single.losses, rel=TOLERANCE)
    for name, parameter in mirrored.model.named_parameters():
        assert torch.allclose(parameter, single.model.get_parameter(name), rtol=TOLERANCE, atol=0), name


# Names and values of arguments


@pytest.mark.parametrize("names", [("class", "class_"), ("seed", "args"), ("from",), ("lambda", "None")])
def test_keywords_of_python_are_names_of_arguments(names: tuple[str, ...]) -> None:
    model = module_of(lambda self, **values: self.layer(sum(values.values())).mean(), layer=nn.Linear(2, 1).double())
    batches = [{name: normal(5, 2, seed=i) for i, name in enumerate(names)}]
    assert_trains_alike(model, SGD, batches, 2, tolerance=TOLERANCE)


@pytest.mark.parametrize("disabled", [(), ("share-parameters",)], ids=["shared", "mirrored"])
def test_variables_of_a_second_program_that_has_not_run(disabled: tuple[str, ...]) -> None:
    model = module_of(
        lambda self, x, layer: (self.a if layer == "a" else self.b)(x).mean(), a=nn.Linear(2, 1), b=nn.Linear(2, 1)
    )
    x = torch.ones(4, 2)
    with compile_eager(model, disable=disabled) as step:
        step(x, "a")
        step.prepare(x, "b")
        assert set(step.variables) == {"b.weight", "b.bias"}
        for name, variable in step.variables.items():
            assert len(variable.values) == 2
            for value in (variable.value, *variable.values):
                assert torch.equal(value, model.get_parameter(name))
        step(x, "b")
        for value in step.variables["b.weight"].values:
            assert torch.equal(value, model.b.weight)
        step(x, "a")
        assert set(step.variables) == {"a.weight", "a.bias"}


@pytest.mark.parametrize("name", ["x", "target"])
def test_an_array_of_numpy_is_refused(name: str) -> None:
    model = make_mlp()
    batch: dict[str, Any] = mlp_batch(6)
    with compile_eager(model, loss_fn=F.cross_entropy) as step:
        for _ in range(2):
            with unchanged(model), pytest.raises(TypeError, match=rf"(?s){name}.*torch\.from_numpy"):
                step(**{**batch, name: batch[name].numpy()})
        step(**batch)


@pytest.mark.fast
def test_an_array_of_numpy_inside_of_an_argument_is_refused() -> None:
    with (
        compile_eager(
            module_of(lambda self, features: self.layer(features["x"]).mean(), layer=nn.Linear(2, 1))
        ) as step,
        pytest.raises(TypeError, match=r"(?s)features.*torch\.from_numpy"),
    ):
        step({"x": torch.ones(4, 2), "mask": [np.ones(4)]})


@pytest.mark.fast
def test_sizes_per_replica_are_told_beside_a_whole_tensor() -> None:
    model = nn.Linear(2, 1)
    x = mirrorc.PerReplica([torch.ones(3, 2), torch.ones(5, 2)])
    with compile_eager(model, loss_fn=F.mse_loss) as step, unchanged(model), pytest.raises(ValueError) as caught:
        step(x, target=torch.ones(8, 1))
    text = str(caught.value)
    assert "target" in text
    assert re.search(r"\b3\b\D{1,5}\b5\b", text), text
    assert re.search(r"\b4\b\D{1,5}\b4\b", text), text


# Modes of autograd around a call


def test_a_call_without_gradients_enabled_trains_all_the_same() -> None:
    with MlpTwins(SGD) as pair:
        for is_enabled in (False, True, False):
            batch = pair.next_batch()
            with torch.set_grad_enabled(is_enabled):
                loss = pair.step(**batch)
                assert torch.is_grad_enabled() == is_enabled
            torch.testing.assert_close(loss, pair.plain(**batch))
        pair.check()


@pytest.mark.parametrize("first_call", [True, False])
def test_a_call_in_inference_mode(first_call: bool) -> None:
    with MlpTwins(SGD) as pair:
        for number in range(3):
            batch = pair.next_batch()
            with torch.inference_mode(number == (0 if first_call else 1)):
                try:
                    pair.step(**batch)
                except (RuntimeError, ExecutionError) as error:
                    assert torch.is_inference_mode_enabled() and "inference_mode" in str(error)
                    continue
            pair.plain(**batch)
        pair.check()
        assert not any(parameter.is_inference() for parameter in pair.model.parameters())
        pair.model(mlp_batch(6)["x"]).sum().backward()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_parameter_that_gets_other_strides_between_steps_keeps_its_state_in_order(devices: int) -> None:
    """Torch's fused kernel itself would take the state for numbers in the order of the parameter's new memory."""
    kinds = iter(({"fused": True}, {"foreach": False}))
    make = lambda parameters: torch.optim.AdamW(parameters, lr=0.1, **next(kinds))  # noqa: E731
    with Twins(nn.Linear(4, 3, dtype=torch.float64), make, F.mse_loss, devices) as pair:
        for seed in range(3):
            pair.train(normal(4, 4, seed=seed), target=normal(4, 3, seed=seed + 10))
            assert_same_model(pair.model, pair.twin, TOLERANCE)
            for each, _ in pair.sides:
                each.weight.data = each.weight.detach().t().contiguous().t()


@pytest.mark.fast
def test_a_refused_model_keeps_its_memory() -> None:
    """Its parameter does not lie densely, and its loss is refused."""
    model = module_of(lambda self, x: x * self.scale, scale=nn.Parameter(torch.zeros(8)[::2]))
    address, strides = model.scale.data_ptr(), model.scale.stride()
    with compiled_step(model) as step, pytest.raises(CaptureError, match="no scalar"):
        step.prepare(torch.ones(4, 4))
    assert (model.scale.data_ptr(), model.scale.stride()) == (address, strides)


class MeanByHand(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.tensor([1.0 / len(x)] * len(x), dtype=x.dtype)
        return (self.linear(x).square().sum(1) * rows).sum() + self.linear(x).sum() / torch.tensor(float(len(x)))


@pytest.mark.parametrize(
    ("devices", "backend"),
    [(3, "eager"), (1, "eager"), (2, "inductor"), *exhaustive((2, "eager"), (1, "inductor"), (3, "inductor"))],
)
def test_constants_that_follow_the_number_of_examples_are_each_shards_own(devices: int, backend: Any) -> None:
    with Twins(MeanByHand(linear=nn.Linear(3, 2)).double(), devices=devices, backend=backend, tolerance=1e-12) as pair:
        for seed in range(3):
            pair.train(normal(7, 3, seed=seed))
        pair.check()


def test_constants_that_are_only_equal_stay_two() -> None:
    with Twins(
        module_of(
            lambda self, x: (self.linear(x) * self.scales[len(x) % 2]).square().mean(),
            linear=nn.Linear(3, 2),
            scales=[torch.ones(2), torch.ones(2)],
        ),
        tolerance=1e-6,
    ) as pair:
        for scale in (1.0, 3.0):
            for own, _ in pair.sides:
                own.scales[1].fill_(scale)  # in place: what was compiled stays true
            x = normal(7, 3).float()
            expected = pair.backward(x[:4], loss_scale=4 / 7) * 4 / 7 + pair.backward(x[4:], loss_scale=3 / 7) * 3 / 7
            pair.update()
            torch.testing.assert_close(pair.step(x), expected)
        pair.check()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_parameters_that_are_called_like_arguments_or_like_one_another(backend: str) -> None:
    torch.manual_seed(0)
    x, weight, target = (torch.randn(4, size, dtype=torch.float64) for size in (5, 3, 3))
    with Twins(
        module_of(
            lambda self, x, weight: self.a((x @ self.weight) * weight) * self.a_weight,
            weight=nn.Parameter(torch.ones(5, 3)),
            a_weight=nn.Parameter(torch.ones(3)),
            a=nn.Linear(3, 3),
        ).double(),
        loss_fn=F.mse_loss,
        backend=backend,
        tolerance=1e-12,
    ) as pair:
        pair.train(x, weight, target=target)
        pair.check()
