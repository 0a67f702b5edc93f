"""Outputs and evaluations of models that run as plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from branching import SGD, TOLERANCE, Net, batches
from references import unchanged
from torch.nn import functional as F
from twins import compiled_step

import mirrorc
from mirrorc import CaptureError, ExecutionError

compiled = partial(compiled_step, loss_fn=F.cross_entropy, optimizer=SGD, capture="autograd", return_outputs=True)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "options"),
    [(3, {}), (2, {"microbatches": 2}), (1, {}), (2, {}), (2, {"backend": "inductor"})],
)
def test_outputs_are_those_of_the_whole_batch(num_devices: int, options: dict[str, Any]) -> None:
    model = Net()
    with compiled(model, devices=num_devices, **options) as step:
        for batch in batches(8, 7, 9):
            before = copy.deepcopy(model)
            loss, outputs = step(**batch)
            close(outputs, before(batch["x"]))
            close(loss, F.cross_entropy(before(batch["x"]), batch["target"]))


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_evaluations_run_forward_alone(num_devices: int) -> None:
    model, data = Net(), batches(8, 7)
    with compiled(model, devices=num_devices, return_outputs=False) as step:
        for batch in data:
            close(step.evaluate(**batch), F.cross_entropy(model(batch["x"]), batch["target"]))
            close(step.evaluate(batch["x"]), model(batch["x"]))
            step(**batch)
        model.eval()
        with torch.inference_mode():
            assert step.evaluate(**data[0]).shape == ()
    with compiled(model, devices=num_devices) as step:
        loss, outputs = step.evaluate(**data[0])
        close(outputs, model(data[0]["x"]))
        close(loss, F.cross_entropy(model(data[0]["x"]), data[0]["target"]))


@dataclass
class Found:
    loss: torch.Tensor
    logits: torch.Tensor
    more: dict[str, Any]


class Returns(Net):
    def __init__(self, also: Callable[..., Any] = lambda model, x, y: None) -> None:
        super().__init__()
        self.also = also
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Found:  # type: ignore[override]
        y = super().forward(x)
        self.seen.add_(len(x))
        right = y.argmax(1) == target
        return Found(
            F.cross_entropy(y, target),
            y,
            {
                "right": mirrorc.summed(right.sum()),
                "share": right.double().mean(),
                "target": target,
                "pair": (y, y[:, 0]),
                "name": "net",
                "weight": self.last.weight,
                "also": self.also(self, x, y),
            },
        )


@pytest.mark.slow
def test_what_a_model_returns_is_put_together_again() -> None:
    model = Returns()
    with compiled(model, loss_fn=None) as step:
        for batch in batches(7, 6):
            before = copy.deepcopy(model)
            expected = before(**batch)
            loss, found = step(**batch)
            assert type(found) is Found and found.loss is loss and found.more["target"] is batch["target"]
            assert found.more["name"] == "net" and found.more["also"] is None
            assert found.more["weight"] is model.last.weight
            close(found.loss, expected.loss)
            close(found.logits, expected.logits)
            assert found.more["pair"][0] is found.logits
            close(found.more["pair"][1], expected.logits[:, 0])
            assert found.more["right"] == expected.more["right"]
            close(found.more["share"], expected.more["share"])
        assert step.evaluate(**batch)[1].more["right"] >= 0


REFUSED = [
    (lambda model, x, y: model.last, r"returns a module or a method of one.*'outputs.more.also'"),
    (lambda model, x, y: model.parameters, r"returns a module or a method of one"),
    (lambda model, x, y: lambda: y, r"returns a function that holds other values, as 'outputs.more.also'"),
    (lambda model, x, y: iter([1]), r"returns a list_iterator, as 'outputs.more.also'"),
    (
        lambda model, x, y: mirrorc.summed(y.sum()) * 2,
        r"MC2402: something is computed of a value that is marked by mirrorc.summed",
    ),
    (lambda model, x, y: y.sum().item(), r"'outputs.more.also', which .* differs between two shards of equal shape"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("also", "words"), REFUSED)
def test_what_cannot_be_put_together_is_refused(also: Callable[..., Any], words: str) -> None:
    model = Returns(also)
    with compiled(model, loss_fn=None) as step, unchanged(model), pytest.raises(CaptureError, match=f"(?s){words}"):
        step(**batches(6)[0])
    with compiled(model, loss_fn=None, return_outputs=False) as step:
        step(**batches(6)[0])


LATER = [
    lambda model, x, y: y.sum().item(),
    lambda model, x, y: y[: int(model.seen) % 5 + 1],
    lambda model, x, y: [y] * (int(model.seen) % 5),
    lambda model, x, y: y.float() if int(model.seen) % 2 else y,
]


@pytest.mark.parametrize("also", LATER)
def test_outputs_of_another_structure_fail_before_anything_is_updated(also: Callable[..., Any]) -> None:
    model, (batch,) = Returns(also), batches(3)
    words = r"something else as 'outputs.more.also(?s:.*)No parameter was changed"
    with compiled(model, devices=1, loss_fn=None) as step:
        step(**batch)
        with unchanged(model), pytest.raises(ExecutionError, match=f"(?s){words}"):
            step(**batch)


def test_an_output_of_which_nobody_knows_whether_it_lies_along_the_batch() -> None:
    class Takes(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 4:
                raise ValueError("not four")
            return super().forward(x)

    (batch,) = batches(6)
    with compiled(Takes()) as step, pytest.warns(UserWarning, match="may lie along the batch"):
        _, outputs = step(**batch)
    assert isinstance(outputs, mirrorc.PerReplica)


def test_an_output_whose_shape_depends_on_values_makes_it_run_as_plain_pytorch() -> None:
    def loss_and_counts(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(logits, target), torch.bincount(target, minlength=9)

    (batch,) = batches(8)
    with compiled(Net(), loss_fn=loss_and_counts, capture="auto") as step, pytest.warns(UserWarning, match="MC2701"):
        _, (_, counts) = step(**batch)
    assert torch.equal(sum(counts.values), torch.bincount(batch["target"], minlength=9))
