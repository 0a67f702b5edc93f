"""Bounds of activations: steps keep within it, and train as without it, bit for bit."""

from __future__ import annotations

import re
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from deep import Deep
from references import Trained, assert_same_bits, train_mirrored
from selections import exhaustive, slow
from torch import nn
from torch.nn import functional as F
from twins import batches_of, compiled_step

import mirrorc
from mirrorc.compilation import step_compiler
from mirrorc.errors import CaptureError, PassError
from mirrorc.packing import ByBytes
from mirrorc.passes import ChooseCheckpoints, default_pipeline

ADAMW = partial(torch.optim.AdamW, lr=0.01)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Conv2d(4 if i else 1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for i in range(5)
        ]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(4, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x[:, :36].reshape(-1, 1, 6, 6)).mean((2, 3)))


def train(
    model: nn.Module, num_devices: int, bound: int | str | None, sizes: tuple[int, ...] = (40, 40), **options: Any
) -> Trained:
    torch.manual_seed(1)
    width = 36 if isinstance(model, Images) else 6
    given = batches_of(*sizes, features=width, classes=3)
    return train_mirrored(model, ADAMW, given, num_devices, F.cross_entropy, activations=bound, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "options"),
    [
        (3, {"buckets": ByBytes(0.002, 0.002)}),
        (1, {}),
        (2, {"microbatches": 2}),
        (2, {}),
        (2, {"exact_order": True}),
        (2, {"clip_grad_norm": 0.1, "check_finite": True}),
    ],
)
def test_the_bits_are_those_without_a_bound(num_devices: int, options: dict[str, Any]) -> None:
    assert_same_bits(train(Deep(), num_devices, "70%", **options), train(Deep(), num_devices, None, **options))


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_images_are_learned_with_the_same_bits(num_devices: int) -> None:
    assert_same_bits(train(Images(), num_devices, "80%"), train(Images(), num_devices, None))


@pytest.mark.parametrize("num_devices", [*slow((2,)), *exhaustive((1,), (3,))])
def test_compiled_steps_are_those_without_a_bound(num_devices: int) -> None:
    one, other = (train(Deep(), num_devices, bound, backend="inductor") for bound in ("70%", None))
    assert one.losses == pytest.approx(other.losses, rel=1e-12)
    others = other.model.state_dict()
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(value, others[name], rtol=1e-10, atol=1e-12)


def compiled(model: nn.Module, bound: int | str | None, num_devices: int = 2, **options: Any) -> mirrorc.Step:
    return compiled_step(model, F.cross_entropy, num_devices, optimizer=ADAMW, activations=bound, **options)


def peaks(model: nn.Module, bound: int | str | None, rows: int = 256, **options: Any) -> list[int]:
    (batch,) = batches_of(rows, features=36 if isinstance(model, Images) else 6, classes=3)
    with compiled(model, bound, **options) as step:
        step.prepare(**batch)
        return [device.own.activations for device in step.memory().devices]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Deep, {}),
        (Images, {}),
        (Deep, {"microbatches": 2, "num_devices": 1}),
        (Deep, {"num_devices": 3}),
        *exhaustive((Deep, {"backend": "inductor"}), (Images, {"backend": "inductor"})),
    ],
)
def test_a_step_takes_no_more_than_what_is_allowed(model: type[nn.Module], options: dict[str, Any]) -> None:
    percent = (
        70 if options and model is Images else 60
    )  # compiled regions of convolutions have temporaries of their own
    whole = peaks(model(), None, **options)
    assert max(peaks(model(), f"{percent}%", **options)) <= percent / 100 * max(whole)
    assert max(peaks(model(), int(0.75 * max(whole)), **options)) <= int(0.75 * max(whole))


@pytest.mark.slow
def test_a_bound_that_is_kept_anyway_changes_nothing() -> None:
    (batch,) = batches_of(40, classes=3)
    names = []
    for given in (None, "100%", 2**40):
        with compiled(Deep(), given, disable=["reserve-memory"]) as step:
            step.prepare(**batch)
            bodies = [region.graph_module.graph.nodes for region in step.program.regions.values()]
            names.append([[node.name for node in nodes] for nodes in bodies])
    assert names[0] == names[1] == names[2]


@pytest.mark.slow
def test_what_was_chosen_is_in_the_program_and_in_the_figures() -> None:
    (batch,) = batches_of(256, classes=3)
    with compiled(Deep(), "60%") as step:
        step.prepare(**batch)
        told = [str(remark) for remark in step.program.remarks]
        report = step.memory()
    assert any(re.match(r"activations='60%' allows \S+ KiB for each device, and everything", one) for one in told)
    assert any(re.match(r"choose-checkpoints: \d+ values .* which is \d+\.\d% more work: ", one) for one in told)
    assert any(re.match(r"recompute-checkpoints: \d+ checkpoints?: backward runs \d+ operators", one) for one in told)
    assert any("to be computed again, which is" in remark for remark in report.remarks)


@pytest.mark.slow
def test_checkpoints_of_the_model_are_kept_too() -> None:
    deep = partial(Deep, num_blocks=5)
    assert max(peaks(deep(num_own=2), "80%")) <= 0.8 * max(peaks(deep(num_own=2), None))
    assert_same_bits(train(deep(num_own=2), 2, "80%"), train(deep(), 2, None))


@pytest.mark.slow
def test_evaluations_and_gradients_of_several_calls_are_those_without_a_bound() -> None:
    first, second = batches_of(40, 27, classes=3)
    found = []
    for bound in ("70%", None):
        torch.manual_seed(1)
        model = Deep()
        with compiled(model, bound) as step:
            losses = [step.accumulate(**first), step(**second), step.evaluate(**first)]
        found.append([*losses, *model.state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.slow
def test_a_short_batch_has_the_bound_of_a_large_one() -> None:
    large, short = batches_of(257, 2, classes=3)
    with compiled(Deep(), "60%") as step:
        step(**large)
        most = max(device.own.activations for device in step.memory().devices)
        step(**short)
        assert max(device.own.activations for device in step.memory().devices) < most
        about_bounds = [remark for remark in step.program.remarks if "sizes of arguments" not in str(remark)]
        assert not any("activations=" in str(remark) for remark in about_bounds)


@pytest.mark.slow
def test_a_bound_that_cannot_be_kept_names_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Mock(side_effect=step_compiler.report_memory)
    monkeypatch.setattr(step_compiler, "report_memory", counted)
    with pytest.raises(PassError) as raised:
        peaks(Deep(), 1000)
    assert counted.call_count == 2  # lower targets have the same choice, so they are not compiled
    text = str(raised.value)
    found = re.match(
        r"MC1508: activations=1000 allows 1\.0 KiB for each device, and recomputing .* \((\d+) bytes\) at least"
        r"\n  at:   deep\.py:\d+ .*\n  why:  the peak is on cpu:0 in .*; "
        r"the largest values there are .*\n"
        r"  fix:  memory=mirrorc\.Memory\(activations=\1\)\n  or:   .*microbatches=",
        text,
    )
    assert found is not None, text
    assert max(peaks(Deep(), int(found[1]))) <= int(found[1])


@pytest.mark.parametrize(
    ("bound", "options", "words"),
    [
        ("0%", {}, "activations is '0%': give a size .* a part of what activations would take, such as '50%'"),
        ("150%", {}, "activations is '150%': give .* a part"),
        ("nan%", {}, "activations is 'nan%': give .* a part"),
        (
            "50%",
            {"disable": ["recompute-checkpoints"]},
            "activations='50%' needs the pass 'recompute-checkpoints', which disable= switches off",
        ),
        (
            "50%",
            {"disable": ["choose-checkpoints"]},
            "activations='50%' needs the pass 'choose-checkpoints', which disable= switches off",
        ),
        ("50%", {"passes": default_pipeline()}, r"put mirrorc.passes.ChooseCheckpoints\(\) there"),
    ],
)
def test_wrong_bounds_are_refused(bound: int | str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compiled(Deep(), bound, **options)


@pytest.mark.slow
def test_a_pipeline_of_ones_own_may_choose() -> None:
    whole = max(peaks(Deep(), None))
    pipeline = default_pipeline(chooses_checkpoints=True, reserves_memory=False)
    assert max(peaks(Deep(), "70%", passes=pipeline)) <= 0.7 * whole
    own = [mirrorc.before("recompute-checkpoints", ChooseCheckpoints(0))]
    assert max(peaks(Deep(), None, add=own)) < 0.8 * whole


def test_a_model_that_runs_as_plain_pytorch_is_refused() -> None:
    (batch,) = batches_of(8, classes=3)
    with (
        compiled(Deep(), "50%", capture="autograd") as step,
        pytest.raises(CaptureError, match="what its forward keeps"),
    ):
        step(**batch)
