"""A loss of torch that reduces otherwise than the step is told is warned of; what may be a mean made of a sum is not."""

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from selections import slow, slow_but
from tiny_programs import sgd_step
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import mirrorc
from mirrorc.capture.diagnostics.loss_means import weighted_mean

X = torch.randn(6, 3)
Loss = Callable[[torch.Tensor, torch.Tensor], Any]


def said(loss_fn: Loss, devices: int = 2, return_outputs: bool = False, **options: Any) -> list[str]:
    options = {"loss_fn": loss_fn, "return_outputs": return_outputs, **options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sgd_step(nn.Linear(3, 3), devices, **options) as step:
            step(X, target=torch.ones(6, 3))
            step(X[:4], target=torch.ones(4, 3))
    found = [w for w in caught if w.category is UserWarning]
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


SUMS: dict[str, Loss] = {
    "function": lambda o, y: F.mse_loss(o, y, reduction="sum"),
    "by position": lambda o, y: F.smooth_l1_loss(o, y, None, None, "sum"),
    "a summand": lambda o, y: 0.1 * o.square().mean() + F.binary_cross_entropy_with_logits(o, y, reduction="sum"),
    "subtracted": lambda o, y: o.mean().sub(F.l1_loss(o, y, reduction="sum")),
    "divided by a number": lambda o, y: F.mse_loss(o, y, reduction="sum") / 4,
    "scaled": lambda o, y: 0.125 * F.mse_loss(o, y, reduction="sum"),
    "divided by the whole batch": lambda o, y: F.mse_loss(o, y, reduction="sum").div(6),
    "metrics": lambda o, y: (F.mse_loss(o, y, reduction="sum"), {"mean": o.mean()}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(SUMS))
def test_a_sum_is_warned_of_where_the_loss_is_taken_for_a_mean(kind: str) -> None:
    (message,) = said(SUMS[kind], return_outputs=kind == "metrics")
    assert "in the loss of Linear is a sum, but the step averages it over devices" in message
    assert "about 1/2 of the sum over the batch\n  fix:  mirrorc.compile(..., loss_reduction='sum')" in message
    assert not said(SUMS[kind], devices=1)


@pytest.mark.slow
def test_a_mean_is_warned_of_where_the_loss_is_taken_for_a_sum() -> None:
    (message,) = said(lambda o, y: F.mse_loss(o, y), devices=3, loss_reduction="sum")
    assert "mse_loss in the loss of Linear is a mean, but loss_reduction='sum' adds it up" in message
    assert "about 3 times the mean of the batch" in message
    (message,) = said(lambda o, y: F.kl_div(o, y, reduction="batchmean"), loss_reduction="sum")
    assert "kl_div" in message


RIGHT: dict[str, Loss] = {
    "divided": lambda o, y: F.mse_loss(o, y, reduction="sum") / len(o),
    "multiplied": lambda o, y: F.mse_loss(o, y, reduction="sum") * (1 / len(o)),
    "mean": lambda o, y: F.mse_loss(o, y),
    "half": lambda o, y: 0.5 * F.mse_loss(o, y, reduction="sum") / len(o),
    "elements": lambda o, y: F.mse_loss(o, y, reduction="sum") / o.numel(),
    "each example": lambda o, y: F.mse_loss(o, y, reduction="none").sum(1).mean(),
    "batchmean": lambda o, y: F.kl_div(o.log_softmax(1), y.softmax(1), reduction="batchmean"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(RIGHT))
def test_what_is_a_mean_or_may_be_one_is_not_spoken_of(kind: str) -> None:
    assert not said(RIGHT[kind])


def test_a_mean_times_the_number_of_examples_is_a_sum() -> None:
    assert not said(lambda o, y: len(o) * F.mse_loss(o, y), loss_reduction="sum")


def test_a_number_from_outside_may_be_that_of_a_shard() -> None:
    assert not said(lambda o, y: F.mse_loss(o, y, reduction="sum") / 9, loss_reduction="sum")


def test_a_sum_that_is_told_is_not_spoken_of() -> None:
    assert not said(lambda o, y: F.mse_loss(o, y, reduction="sum"), loss_reduction="sum")


def test_a_penalty_on_parameters_alone_is_not_spoken_of() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            apart = F.mse_loss(self.linear.weight, self.other.weight, reduction="sum")
            return self.other(self.linear(x)).square().mean() + apart

    model = Model()
    with warnings.catch_warnings(), sgd_step(model, 2) as step:
        warnings.simplefilter("error")
        step(X)


class Tagger(nn.Module):
    """Classes for words, whose loss leaves out the first word and those that are no words."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.last = nn.Linear(3, 4)
        self.criterion = nn.CrossEntropyLoss(**options)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shifted = F.pad(labels, (0, 1), value=self.criterion.ignore_index)[:, 1:].contiguous()
        return self.criterion(self.last(x).flatten(0, 1), shifted.view(-1))


def batch(left_out: int = -100, per_example: tuple[int, ...] = (0, 0, 0, 0)) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(1, 4, (len(per_example), 5))
    for row, number in zip(labels, per_example, strict=True):
        row[:number] = left_out
    return {"x": torch.randn(len(per_example), 5, 3), "labels": labels}


def warned(model: nn.Module, *batches: dict[str, Any], num_devices: int = 2, **options: Any) -> tuple[list[str], str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sgd_step(model, num_devices, **options) as step:
            for own in batches:
                step(**own)
            remarks = "\n".join(r.text for r in step.program.remarks if "each device divides" in r.text)
    found = [w for w in caught if "MC3101" in str(w.message)]
    assert all(w.filename == __file__ for w in found), "it points at the user's call"
    return [str(w.message) for w in found], remarks


def test_class_weights_are_warned_of_once() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    messages, remarks = warned(Tagger(weight=weight), batch(), batch(per_example=(1, 1, 1, 1, 1, 1)))
    assert len(messages) == 1 and "MC3101: the loss gives other gradients on 2 devices than on one" in messages[0]
    assert (
        "test_loss_means.py:" in messages[0]
        and "each device divides by the class weights of its own shard" in messages[0]
    )
    assert "reduction='sum'" in messages[0] and "mirrorc.check_loss" in messages[0]
    assert "each device divides by the class weights" in remarks
    assert warned(Tagger(weight=weight), batch(), num_devices=1) == ([], ""), "one device is right"


@pytest.mark.slow
def test_targets_that_are_left_out_count_where_shards_differ_in_them() -> None:
    messages, remarks = warned(Tagger(), batch(per_example=(1, 2, 0, 0)))
    assert len(messages) == 1 and "3 of 10, 2 of 10 in the shards of this batch" in messages[0]
    assert "leaves out" not in remarks, "a program does not depend on the batch's values"
    for even in ((0, 0, 0, 0), (2, 1, 1, 2)):
        assert warned(Tagger(), batch(per_example=even))[0] == []
    messages, remarks = warned(Tagger(ignore_index=0), batch(0, (2, 2, 2, 2)))
    assert messages == [] and "the number of targets that are not 0" in remarks, "another batch may differ"
    assert len(warned(Tagger(ignore_index=0), batch(0, (2, 2, 2, 1)))[0]) == 1


Targets = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Marked(nn.Module):
    """Leaves out targets by itself."""

    def __init__(self, targets: Targets) -> None:
        super().__init__()
        self.last, self.targets = nn.Linear(3, 4), targets

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        output = self.last(x)
        return F.cross_entropy(output.flatten(0, 1), self.targets(output, labels).reshape(-1))


def assigned(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    labels = labels.clone()
    labels[labels == 0] = -100
    return labels


def ends_filled(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    labels = labels.clone()
    labels[:, 0].fill_(-100)
    return labels


@pytest.mark.parametrize(
    ("targets", "numbers"),
    [
        (lambda output, labels: labels.masked_fill(labels == 0, -100), r"3 of 10, 0 of 10 in the shards of this batch"),
        *slow(
            (lambda output, labels: torch.where(labels == 0, -100, labels), "3 of 10, 0 of 10"),
            (assigned, "3 of 10, 0 of 10"),
            (lambda output, labels: labels.masked_fill(output.amax(-1) < 0.2, -100), "of its own shard\n"),
            (ends_filled, None),
            (lambda output, labels: labels.clamp(min=1), None),
        ),
    ],
)
def test_targets_that_forward_leaves_out_count_like_those_left_out_before(
    targets: Targets, numbers: str | None
) -> None:
    messages, _ = warned(Marked(targets), batch(), batch(0, (1, 2, 0, 0)), batch(0, (1, 2, 0, 0, 1, 0)))
    assert len(messages) == (numbers is not None), "also of other values, if the first batch shows it"
    messages, _ = warned(Marked(targets), batch(0, (1, 2, 0, 0)))
    assert len(messages) == (numbers is not None) and (numbers or "") in "".join(messages)


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_plain_pytorch_counts_them_too(capture: str) -> None:
    filled = Marked(lambda output, labels: labels.masked_fill(labels == 0, -100))
    for model, left_out in ((filled, 0), (Marked(lambda output, labels: labels), -100)):
        assert warned(model, batch(left_out, (1, 1, 1, 1)), capture=capture)[0] == []
        messages, _ = warned(model, batch(left_out, (1, 2, 0, 0)), capture=capture)
        assert len(messages) == 1 and re.search(r"test_loss_means.py:.*3 of 10, 0 of 10 in the shards", messages[0])


@pytest.mark.parametrize("backend", slow_but(["eager"], ["eager", "inductor"]))
@pytest.mark.parametrize("options", [{}, {"weight": torch.tensor([1.0, 2.0, 3.0, 4.0]), "label_smoothing": 0.1}])
def test_a_shard_without_targets_gives_no_gradient_and_a_loss_that_is_not_a_number(
    backend: str, options: dict[str, Any]
) -> None:
    model = Tagger(**options)
    twin = copy.deepcopy(model)
    whole, empty = batch(), batch(per_example=(1, 0, 5, 5))
    (0.5 * twin(**{name: value[:2] for name, value in empty.items()})).backward()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mirrorc.compile(model, 2, optimizer=optimizer, compiler=mirrorc.Compiler(backend=backend)) as step:
            step(**whole)
            model.load_state_dict(twin.state_dict())
            assert step(**empty).isnan()
        for found, parameter in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(found, parameter - 0.1 * parameter.grad)


@pytest.mark.slow
def test_other_means_and_other_reductions_are_right() -> None:
    for loss_fn, target in (
        (F.cross_entropy, torch.tensor([0, 1, 2, 0])),
        (
            nn.CrossEntropyLoss(weight=torch.ones(3)),
            torch.softmax(torch.randn(4, 3), 1),
        ),  # a mean over examples: of probabilities
        (F.mse_loss, torch.randn(4, 3)),
        (lambda o, t: F.cross_entropy(o, t, weight=torch.ones(3), reduction="none").mean(), torch.tensor([0, 1, 2, 0])),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), torch.rand(4, 3)),
    ):
        given = {"input": torch.randn(4, 6), "target": target}
        assert warned(nn.Linear(6, 3), given, loss_fn=loss_fn) == ([], "")
        assert mirrorc.check_loss(nn.Linear(6, 3), **given, loss_fn=loss_fn).same
    assert weighted_mean([], (), {}) is None, "a target of a graph need not be hashable"


@pytest.mark.slow
def test_a_language_model_that_pads_its_labels() -> None:
    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    tokens = torch.randint(61, (4, 12))
    padded = tokens.clone()
    padded[0, 6:] = -100
    for labels, number in ((tokens, 0), (padded, 1)):
        assert len(warned(GPT2LMHeadModel(config), {"input_ids": tokens, "labels": labels})[0]) == number
