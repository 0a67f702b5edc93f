"""Pipelines and models at the edges of what `mirrorc.compile` takes."""

import importlib.metadata
import logging
import re
import typing
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from tiny_programs import sgd_step
from torch import nn

import mirrorc
from mirrorc.capture.front_ends import front_end
from mirrorc.ir.links import link_names
from mirrorc.packing import ByBytes
from mirrorc.runtime.codegen import regions


def compiled(model: nn.Module, **options: object) -> mirrorc.Step:
    return sgd_step(model, ["cpu:0", "cpu:1"], loss_fn=nn.functional.mse_loss, timeout=60.0, **options)


@pytest.mark.parametrize("name", ["plan-buckets", "lower-collectives", "lower-devices"])
def test_a_pipeline_that_cannot_run_is_refused_by_an_error_of_mirrorc(name: str) -> None:
    with pytest.raises(mirrorc.MirrorcError):
        compiled(nn.Linear(3, 2), disable=[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["place-gradients", "share-parameters", "schedule-overlap"])
def test_a_pipeline_without_a_pass_that_only_makes_it_faster_gives_the_same_bits(name: str) -> None:
    found = []
    for disabled in ((), (name,)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))
        x, y = torch.randn(5, 3), torch.randn(5, 2)
        with compiled(model, disable=disabled, buckets=ByBytes(1e-4, 1e-4)) as step:
            losses = [step(x, target=y) for _ in range(3)]
        found.append([*losses, *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *found))


class TwoParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(2))


class SharedGradient(TwoParameters):
    """Two parameters whose gradients are one tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.one + self.other)


class OnlyScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class UsedGradient(TwoParameters):
    """The gradient of ``other`` is what the gradient of ``one`` is made from, in another bucket's region."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.tanh(self.one) + self.other)


class OnlyLoss(OnlyScale):
    """The gradient of its parameter is the loss's own tangent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean() + self.scale


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SharedGradient, UsedGradient, OnlyScale])
@pytest.mark.parametrize("num_buckets", ["one", "many"])
def test_models_with_unusual_gradients_train_as_on_one_device(kind: type[nn.Module], num_buckets: str) -> None:
    x, y = torch.randn(5, 2), torch.randn(5, 2)
    single, model = kind(), kind()
    caps = {} if num_buckets == "one" else {"buckets": ByBytes(1e-6, 1e-6)}
    with compiled(model, **caps) as step:
        step(x, target=y)
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    nn.functional.mse_loss(single(x), y).backward()
    optimizer.step()
    for found, expected in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_a_parameter_that_is_the_loss_trains_as_on_one_device() -> None:
    model = OnlyLoss()
    with sgd_step(model, 2, lr=0.5) as step:
        loss = step(torch.ones(4, 1))
    torch.testing.assert_close(loss, torch.tensor(3.0))
    torch.testing.assert_close(model.scale.detach(), torch.tensor(1.5))


def test_the_version_is_that_of_the_package() -> None:
    assert mirrorc.__version__ == importlib.metadata.version("mirrorc")


def test_types_name_the_texts_that_options_take() -> None:
    hints = typing.get_type_hints(mirrorc.compile)
    for group in (mirrorc.Communication, mirrorc.Compiler):
        hints |= typing.get_type_hints(group)

    def named(option: str) -> set[str]:
        of_option = (
            typing.get_args(hints[option]) if typing.get_origin(hints[option]) is not Literal else (hints[option],)
        )
        return {text for kind in of_option if typing.get_origin(kind) is Literal for text in typing.get_args(kind)}

    for option, choices in {
        "loss_reduction": {"mean", "sum"},
        "backend": set(regions._backends),
        "link": set(link_names()),
        "capture": {"auto", *front_end._front_ends},
    }.items():
        assert named(option) == choices, option


@pytest.mark.slow
def test_a_step_says_what_it_is() -> None:
    with compiled(nn.Linear(3, 2)) as step:
        assert repr(step) == "<Step of Linear on cpu:0, cpu:1, backend eager: not compiled yet>"
        step(torch.ones(4, 3), target=torch.zeros(4, 2))
        assert repr(step) == "<Step of Linear on cpu:0, cpu:1, backend eager: 1 compiled program>"
    assert repr(step) == "<Step of Linear on cpu:0, cpu:1, backend eager: closed>"


def test_an_attribute_that_a_step_would_not_obey_cannot_be_set() -> None:
    model = nn.Linear(2, 2)
    with sgd_step(model, 1, loss_fn=nn.MSELoss()) as step:
        with pytest.raises(
            AttributeError,
            match=r"MC1601: step.clip_grad_norm cannot be set\n.*\n  fix:  mirrorc.compile\(\.\.\., clip_grad_norm=",
        ):
            step.clip_grad_norm = 1.0  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match="num_skipped"):
            step.num_skipped = 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mirrorc.summed(None), "summed takes a tensor, not NoneType"),
        (lambda: mirrorc.summed(3), "summed takes a tensor, not int"),
        (lambda: mirrorc.join(None), "was given a NoneType\n  fix:  mirrorc.join"),
        (
            lambda: mirrorc.PerReplica(None),
            r"values for all replicas, not NoneType\n  fix:  mirrorc.PerReplica\(\[x0, x1\]\)",
        ),
        (lambda: mirrorc.PerReplica(torch.zeros(2, 3)), "values for all replicas, not Tensor"),
        (lambda: mirrorc.PerReplica({"x": torch.zeros(2)}), "values for all replicas, not dict"),
    ],
)
def test_what_is_no_such_object_is_refused_where_it_is_given(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.slow
def test_a_log_tells_what_is_compiled_and_how_long_it_took(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="mirrorc"), compiled(nn.Linear(3, 2)) as step:
        for _ in range(2):
            step(torch.ones(4, 3), target=torch.zeros(4, 2))
    first, second = [
        record.getMessage() for record in caplog.records if record.name == "mirrorc.compilation.step_compiler"
    ]
    assert (
        first
        == "compiling Linear for cpu:0, cpu:1 (the first call), for a shard of input float32[2, 3], target float32[2, 2]"
    )
    seconds = r"\d+\.\d\d s"
    pattern = (
        rf"compiled Linear for cpu:0, cpu:1 in ({seconds}): ({seconds}) for the capture, ({seconds}) for the passes, ({seconds}) "
        r"for the regions; \d+ regions?, 1 bucket"
    )
    found = re.fullmatch(pattern, second)
    assert found is not None
    total, *parts = (float(text.removesuffix(" s")) for text in found.groups())
    assert abs(total - sum(parts)) < 0.03  # each is rounded
