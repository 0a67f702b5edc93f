"""The parts of a loss that replicas compute add up to that of the batch, whatever it is a mean over."""

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


def batch(lengths: list[int], dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    labels = torch.full((len(lengths), 4), -100)
    for row, length in enumerate(lengths):
        labels[row, :length] = torch.arange(length)
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(len(lengths), 4, 3, dtype=torch.float64, generator=generator).to(dtype), "labels": labels}


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "loss", [of_labels, of_labels_but_the_first, of_examples, of_items], ids=lambda loss: loss.__name__
)
def test_units_of_losses_of_any_precision_are_the_nearest(loss: Loss, dtype: torch.dtype) -> None:
    model, weights, inputs = Model(loss).to(dtype), LossWeights(), batch([4, 1, 3, 2, 2], dtype)
    assert weights.divides(model, inputs) == (loss is of_items)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        way = weights._way(model, inputs)
    assert way == {of_items: "labels"}.get(loss, loss.__name__.removeprefix("of_").replace("_", " "))


def test_units_are_those_of_losses_in_single_precision_of_logits_in_halves() -> None:
    def loss(logits: torch.Tensor, labels: torch.Tensor, number: Any) -> torch.Tensor:
        return of_examples(logits.bfloat16().float(), labels, number)

    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert LossWeights()._way(Model(loss).float(), batch([4, 1, 3, 2, 2], torch.float32)) == "examples"


def test_weighted_losses_in_halves_do_not_overflow() -> None:
    model = Model(lambda logits, labels, number: 4096 * of_labels(logits, labels, number)).half()
    weights, inputs = LossWeights(), batch([4, 1, 3, 2, 4, 4, 4, 4, 4], torch.float16)
    expected = model(**inputs)[0].item()
    with mirrorc.data_parallel(model, 2, compiler=EAGER, debug=QUIET) as parallel:
        with weights.applied(parallel, inputs, False):
            loss = parallel(**inputs)[0]
        loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-2)
    assert model.layer.bias.grad.isfinite().all()


def number_of_forwards(model: nn.Module, weights: LossWeights, batches: list[dict[str, torch.Tensor]]) -> list[int]:
    """Of the plain model, for each batch."""
    calls, numbers = [], []
    with model.register_forward_pre_hook(lambda *_: calls.append("forward")):
        for inputs in batches:
            weights._way(model, inputs)
            numbers.append(len(calls))
            calls.clear()
    return numbers


def test_the_first_batch_that_tells_decides_for_all() -> None:
    batches = [batch(lengths) for lengths in ([4, 4], [3, 3, 0], [4, 1, 3], [4, 2, 1], [4, 4])]
    assert number_of_forwards(Model(of_labels), LossWeights(), batches[:1] + batches[2:]) == [0, 3, 0, 0]
    weights = LossWeights()  # of labels and labels but the first, the second batch does not tell
    assert number_of_forwards(Model(of_labels_but_the_first), weights, batches) == [0, 3, 3, 0, 0]
    assert weights._ways == ["labels but the first"]


def test_rows_that_weigh_the_same_but_for_rounding_need_no_forward() -> None:
    labels = torch.zeros(4, 4096, dtype=torch.long)
    labels[0, 0] = labels[1, -2:] = -100
    model = Model(of_labels).float()
    assert number_of_forwards(model, LossWeights(), [{"x": torch.zeros(4, 4096, 3), "labels": labels}] * 4) == [0] * 4


def test_losses_that_are_all_the_same_are_asked_ever_more_rarely() -> None:
    weights, model = LossWeights(), Model(of_examples)
    nn.init.zeros_(model.layer.weight)
    nn.init.zeros_(model.layer.bias)
    batches = [batch([4, 1, 3])] * 9
    assert number_of_forwards(model, weights, batches) == [3, 3, 0, 3, 0, 0, 0, 3, 0]
    nn.init.ones_(model.layer.weight[1:])
    with pytest.warns(UserWarning, match=r"MC3101(.|\n)*over labels, not examples"):
        assert number_of_forwards(model, weights, batches) == [0] * 6 + [3, 0, 0]
    assert weights._ways == ["examples"]


def test_workers_decide_the_same() -> None:
    def with_other(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_tensor(other)])

    other = [0.0, 0.0, 1.0]  # of a worker that has found it
    assert LossWeights(with_other)._way(Model(of_examples), batch([4, 4])) == "examples"
    weights, other = LossWeights(with_other), [3.0, 3.0]
    assert not weights.divides(Model(lambda logits, labels, number: logits.sum() * 0.0), batch([4, 4]))


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
