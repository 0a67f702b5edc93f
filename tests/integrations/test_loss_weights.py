"""The parts of a loss that replicas compute add up to that of the batch, whatever it is a mean over."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.integrations.loss_weights import LossWeights

EAGER = mirrorc.Compiler(backend="eager")
QUIET = mirrorc.Debug(progress=False)
Loss = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]


class Model(nn.Module):
    """Logits for each of 4 places of a row, and a loss of them."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss = nn.Linear(3, 5).double(), loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None) -> Any:
        logits = self.layer(x)
        return self.loss(logits, labels, num_items_in_batch), logits


def of_labels(logits: torch.Tensor, labels: torch.Tensor, number: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_labels_but_the_first(logits: torch.Tensor, labels: torch.Tensor, number: Any) -> torch.Tensor:
    return of_labels(logits[:, :-1], labels[:, 1:], number)


def of_examples(logits: torch.Tensor, labels: torch.Tensor, number: Any) -> torch.Tensor:
    return F.cross_entropy(logits[:, 0], labels.clamp(min=0)[:, 0])


def of_items(logits: torch.Tensor, labels: torch.Tensor, number: Any) -> torch.Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum" if number is not None else "mean")
    return losses / number if number is not None else losses


def of_neither(logits: torch.Tensor, labels: torch.Tensor, number: Any) -> torch.Tensor:
    return logits.square().mean().sqrt()


def batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    labels = torch.full((len(lengths), 4), -100)
    for row, length in enumerate(lengths):
        labels[row, :length] = torch.arange(length)
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(len(lengths), 4, 3, dtype=torch.float64, generator=generator), "labels": labels}


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss", [of_labels, of_labels_but_the_first, of_examples, of_items], ids=lambda loss: loss.__name__
)
def test_losses_and_gradients_are_those_of_one_device(loss: Loss) -> None:
    plain, model = Model(loss), Model(loss)
    weights = LossWeights()
    items = {"num_items_in_batch": mirrorc.replicated(torch.tensor(17.0))} if loss is of_items else {}
    with mirrorc.data_parallel(model, 2, compiler=EAGER, debug=QUIET) as parallel, warnings.catch_warnings():
        warnings.filterwarnings("error", "MC3101")
        for lengths in ([4, 4, 4], [4, 1, 3, 2, 2]):  # the first decides nothing
            inputs = batch(lengths)
            if items:
                assert weights.divides(model, inputs)
            with weights.applied(parallel, inputs, bool(items)):
                loss_of_all = parallel(**inputs, **items)[0]
            other = plain(**inputs, **({"num_items_in_batch": 17.0} if items else {}))[0]
            loss_of_all.backward()
            other.backward()
            assert loss_of_all.item() == pytest.approx(other.item(), rel=1e-12)
            assert torch.allclose(model.layer.weight.grad, plain.layer.weight.grad, rtol=1e-12, atol=1e-12)


def test_replicas_without_labels_count_nothing() -> None:
    plain, model = Model(of_labels), Model(of_labels)
    with mirrorc.data_parallel(model, 2, compiler=EAGER, debug=QUIET) as parallel:
        inputs = batch([3, 2, 0, 0])
        with LossWeights().applied(parallel, inputs, False):
            parallel(**inputs)[0].backward()
    plain(**inputs)[0].backward()
    assert torch.allclose(model.layer.weight.grad, plain.layer.weight.grad, rtol=1e-12, atol=1e-12)


def test_a_mean_over_something_else_is_told() -> None:
    weights, model = LossWeights(), Model(of_neither)
    assert not weights.divides(model, batch([4, 1]))
    with mirrorc.data_parallel(model, 2, compiler=EAGER, debug=QUIET) as parallel:
        warned = pytest.warns(UserWarning, match="MC3101: the loss gives other gradients")
        with warned, weights.applied(parallel, batch([4, 1, 3]), False):
            pass
        assert "forward" not in model.__dict__
