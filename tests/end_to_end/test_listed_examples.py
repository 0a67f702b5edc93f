"""Examples that are items of a list, parts that the user has cut, and batches along other dims than the first."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from references import assert_same_model, assert_same_parameters, unchanged
from selections import exhaustive, slow, slow_but
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step
from worker_lists import Detector, Targets, images, on_one_device, targets_of
from worker_processes import outcomes, workers

import mirrorc

pytestmark = pytest.mark.fast

CAPTURES = ["dynamo", "autograd"]
BATCHES = [(1, 4, 2, 3, 2), (3, 1, 2), (2, 2, 5, 1, 1), (3,), (2, 5)]
"""The numbers of boxes of each example."""


def same(pair: Twins, plain: tuple[Any, ...], marked: tuple[Any, ...] | None = None, tolerance: float = 1e-12) -> None:
    """A step of both, where the step's arguments may have marks."""
    loss = pair.step(*(plain if marked is None else marked))
    expected = pair.plain(*plain)
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    assert_same_model(pair.model, pair.twin, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("capture", CAPTURES)
def test_targets_of_a_detector_are_split_by_items(capture: str, devices: int) -> None:
    with Twins(Detector(), devices=devices, capture=capture) as pair, warnings.catch_warnings():
        warnings.simplefilter("error")
        for counts in BATCHES:
            x, targets = images(len(counts)), targets_of(*counts)
            same(pair, (x, targets), (x, mirrorc.examples(targets)))


def test_lists_as_long_as_the_batch_are_split_by_items_if_their_tensors_cannot_be() -> None:
    with Twins(Detector(), devices=2, capture="autograd") as pair:
        for counts in BATCHES[:2]:
            same(pair, (images(len(counts)), targets_of(*counts)))


def test_as_many_boxes_as_examples_by_chance_are_warned_of() -> None:
    with Twins(Detector(), devices=2, capture="autograd") as pair:
        same(pair, (images(3), targets_of(1, 2, 3)))
        with pytest.warns(UserWarning, match=r"(?s)MC1310: 'targets'.*is split by items.*examples\(targets\)"):
            same(pair, (images(4), targets_of(4, 4, 4, 4)))


def two_views(plain: int) -> Targets:
    return [
        {"boxes": torch.randn(2, 4).double(), "labels": torch.arange(2), **extra}
        for extra in ({"id": 1}, {"id": plain})
    ]


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_that_are_no_examples_are_split_by_rows(kind: Callable[[Any], Any]) -> None:
    class Views(Detector):
        def forward(self, x: torch.Tensor, views: Any) -> torch.Tensor:
            return sum((self.body(x) - view["boxes"]).square().mean() for view in views)

    with Twins(Views(), devices=2, capture="autograd") as pair, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        same(pair, (images(2), kind(two_views(plain=2 if kind is list else 1))))


class Sets(nn.Module):
    """Sets of vectors, of different sizes, by their largest sums."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3).double()

    def forward(self, sets: list[torch.Tensor], scale: torch.Tensor | None = None) -> torch.Tensor:
        rows = torch.stack([self.layer(each).tanh().sum(0) for each in sets])
        return rows if scale is None else rows * scale


def cross_entropy(output: Any, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def sets_of(*sizes: int) -> list[torch.Tensor]:
    return [torch.randn(size, 5).double() for size in sizes]


@pytest.mark.parametrize("capture", slow_but(["autograd"], CAPTURES))
def test_lists_of_tensors_of_different_sizes(capture: str) -> None:
    with Twins(Sets(), devices=2, loss_fn=cross_entropy, capture=capture) as pair:
        warned = pytest.warns(UserWarning, match="MC1310: 'sets', a list of 3 items, is split by items")
        for sizes, context in [((1, 4, 2), warned), ((7, 3), nullcontext()), ((2, 2, 2, 2, 2), nullcontext())]:
            with context:
                pair.train(sets_of(*sizes), target=torch.arange(len(sizes)) % 3)
        pair.check()


@pytest.mark.parametrize("capture", slow_but(["autograd"], CAPTURES))
@pytest.mark.parametrize("number", [4, 5, 2])
def test_rows_of_outputs_are_those_of_the_items(capture: str, number: int) -> None:
    model = Sets()
    sets, target = sets_of(*range(1, number + 1)), torch.arange(number) % 3
    expected = model(sets)
    with compiled_step(model, cross_entropy, 2, return_outputs=True, capture=capture) as step:
        _, outputs = step(mirrorc.examples(sets), target)
        torch.testing.assert_close(outputs, expected.detach())
        expected = model(sets)
        torch.testing.assert_close(step.evaluate(mirrorc.examples(sets)), expected.detach())


def test_items_that_forward_returns_are_those_of_each_replica() -> None:
    class Returning(Detector):
        def forward(self, x: torch.Tensor, targets: Targets) -> Any:
            return super().forward(x, targets), targets[0]["boxes"]

    targets = targets_of(1, 2, 3, 4)
    with compiled_step(Returning(), devices=2, return_outputs=True, capture="autograd") as step:
        _, (_, boxes) = step(images(4), mirrorc.examples(targets))
    assert [each.tolist() for each in boxes.values] == [targets[i]["boxes"].tolist() for i in (0, 2)]


def test_lists_of_examples_accumulate() -> None:
    with Twins(Detector(), devices=2, capture="autograd") as pair:
        first, second = (images(3), targets_of(1, 2, 5)), (images(2), targets_of(3, 1))
        pair.step.accumulate(first[0], mirrorc.examples(first[1]))
        pair.step(second[0], mirrorc.examples(second[1]))
        x, targets = torch.cat([first[0], second[0]]), [*first[1], *second[1]]
        pair.plain(x, targets)
        assert_same_model(pair.model, pair.twin, 1e-12)


REFUSED: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "other keys": (
        lambda: (images(2), mirrorc.examples([*targets_of(1), {"boxes": torch.zeros(1, 4).double()}])),
        "MC1310: items 0 and 1 of 'targets' differ in structure",
    ),
    "plain values": (
        lambda: (images(2), mirrorc.examples([{"id": 1, **target} for target in targets_of(1)] + [{"id": 2}])),
        "MC1310: items 0 and 1 of 'targets' differ in structure, plain values",
    ),
    "another number of items": (
        lambda: (images(3), mirrorc.examples(targets_of(1, 2))),
        "MC1304: arguments disagree on dim 0: 'x' has 3 examples, 'targets' has 2",
    ),
    "lists that are not marked": (
        lambda: (images(3), targets_of(1, 2)),
        "mirrorc.examples(targets), if each item of 'targets' is one example",
    ),
    "marks within marks": (lambda: (images(2), mirrorc.replicated(mirrorc.examples(targets_of(1, 2)))), "MC1310"),
    "marks within items": (
        lambda: (images(1), mirrorc.examples([{"boxes": mirrorc.PerReplica([images(1)] * 2)}])),
        "MC1310",
    ),
    "lists of each replica": (
        lambda: (mirrorc.PerReplica(images(3).split((1, 2))), mirrorc.PerReplica([targets_of(1), targets_of(1, 2)])),
        "mirrorc.PerReplica([mirrorc.examples(a), mirrorc.examples(b)])",
    ),
    "no items": (lambda: (images(0), mirrorc.examples([])), "MC1305"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_lists_that_cannot_be_split_are_refused(case: str) -> None:
    make, error = REFUSED[case]
    model = Detector()
    with compiled_step(model, devices=2) as step, unchanged(model), pytest.raises(ValueError) as raised:
        step(*make())
    assert error in str(raised.value)


def test_microbatches_of_a_list_are_refused() -> None:
    model = Detector()
    error = pytest.raises(ValueError, match="MC1307: argument 'targets' cannot be cut into microbatches")
    with compiled_step(model, devices=2, microbatches=2) as step, unchanged(model), error:
        step(images(4), mirrorc.examples(targets_of(1, 2, 3, 4)))


def test_only_lists_are_marked() -> None:
    with pytest.raises(
        TypeError, match=r"MC1310: mirrorc\.examples takes a list with an item for each example, not Tensor"
    ):
        mirrorc.examples(images(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("capture", slow_but(["autograd"], CAPTURES))
def test_lists_that_the_user_has_cut(capture: str) -> None:
    with Twins(Detector(), devices=3, capture=capture) as pair:
        for cut in [(1, 3, 1), (2, 2, 0)]:
            number = sum(cut)
            x, targets = images(number), targets_of(*range(1, number + 1))
            begins = [sum(cut[:i]) for i in range(3)]
            parts = [targets[begin : begin + size] for begin, size in zip(begins, cut, strict=True)]
            same(
                pair,
                (x, targets),
                (mirrorc.PerReplica(x.split(cut)), mirrorc.PerReplica([*map(mirrorc.examples, parts)])),
            )


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = nn.EmbeddingBag(9, 3, mode="mean").double()

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(indices, offsets)


@pytest.mark.parametrize("capture", CAPTURES)
def test_indices_and_offsets_of_bags_that_the_user_has_cut(capture: str) -> None:
    indices = torch.tensor([1, 2, 2, 5, 8, 0, 3])
    offsets, target = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 2])
    parts = [(indices[:3], offsets[:2]), (indices[3:], torch.tensor([0]))]
    with Twins(Bags(), devices=2, loss_fn=cross_entropy, capture=capture) as pair:
        marked = [mirrorc.PerReplica([mirrorc.replicated(part[0]) for part in parts])]
        marked.append(mirrorc.PerReplica([part[1] for part in parts]))
        for _ in range(2):
            loss = pair.step(*marked, mirrorc.PerReplica(target.split((2, 1))))
            assert loss.item() == pytest.approx(pair.plain(indices, offsets, target=target).item(), rel=1e-12)
        assert_same_model(pair.model, pair.twin, 1e-12)


class Recurrent(nn.Module):
    """Time first, as the layer has it without batch_first; the loss is a mean over examples and time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.GRU(3, 4, num_layers=2).double()

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.layer(x, hidden)
        return outputs.square().mean()


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("options", [{"capture": "dynamo"}, {"capture": "autograd"}, {"microbatches": 2}])
def test_time_first_and_hidden_states_are_split_along_their_batch(options: dict[str, Any], devices: int) -> None:
    with Twins(Recurrent(), devices=devices, **options) as pair:
        for number in (6, 7):
            x, hidden = torch.randn(4, number, 3).double(), torch.randn(2, number, 4).double()
            if "microbatches" in options and (number, devices) != (6, 3):
                number = 4 * devices  # equal parts
                x, hidden = torch.randn(4, number, 3).double(), torch.randn(2, number, 4).double()
            same(pair, (x, hidden), (mirrorc.batch_dim(x, 1), mirrorc.batch_dim(hidden, -2)), tolerance=1e-10)


def test_a_dim_that_a_tensor_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"MC1306: mirrorc\.batch_dim takes a tensor and one of its dims"):
        mirrorc.batch_dim(torch.zeros(3, 4), 2)


@pytest.mark.slow
def test_workers_with_lists_of_their_own(tmp_path: Path) -> None:
    counts = [[[1, 4, 2], [3, 1]], [[2], [1, 2, 1, 2]], [[], [3, 1]], [[], [1, 2, 2]]]
    cases = {
        capture: {"devices": [2, 1], "capture": capture, "counts": counts[:calls]}
        for capture, calls in (("dynamo", 4), ("autograd", 2))  # plain PyTorch needs an example on each worker
    }
    found = outcomes(tmp_path, {name: workers("lists", given, num_processes=2) for name, given in cases.items()})
    for name, given in cases.items():
        losses, values = on_one_device(given)
        for rank, own in enumerate(found[name]):
            assert own["losses"] == pytest.approx(losses if rank else [*losses[:2], losses[-1]], rel=1e-10)
            for key, value in values.items():
                torch.testing.assert_close(torch.tensor(own["values"][key]), torch.tensor(value))


def test_images_and_targets_are_both_split_by_items_whatever_their_sizes() -> None:
    """Three images of three channels could be split along their channels, too."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1).double()

        def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> torch.Tensor:
            each = [
                (self.layer(of["boxes"]).mean() - image.mean()) ** 2 for image, of in zip(images, targets, strict=True)
            ]
            return torch.stack(each).mean()

    model = Detector()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with compiled_step(model, None, 2) as step, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in (5, 3):
            images = [torch.randn(3, 5, 5).double() for _ in range(number)]
            targets = [{"boxes": torch.randn(i + 1, 4).double()} for i in range(number)]
            optimizer.zero_grad()
            plain(images, targets).backward()
            optimizer.step()
            step(images, targets)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


# Habits of a loop that meet in one step: kept gradients, parts of a batch, several optimizers, clipping, uneven batches.


Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]
CALLS = ([8], [7, 8], [3, 8, 5], [1, 2], [9])  # the numbers of examples of the calls up to each update


def one(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.1)]


def two(model: Any) -> list[torch.optim.Optimizer]:
    by_shares = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    return [by_shares, torch.optim.Adadelta(model[2].parameters(), lr=0.5)]


UNSHARED = {"disable": ["share-parameters"]}
HABITS: list[tuple[int, int, Optimizers, dict[str, Any]]] = [(2, 2, two, {"clip_grad_norm": 0.05})]
MORE: list[tuple[int, int, Optimizers, dict[str, Any]]] = [
    (3, 2, one, UNSHARED),
    (2, 3, one, {"clip_grad_norm": 0.05, "return_outputs": True}),
]
OTHERS: list[tuple[int, int, Optimizers, dict[str, Any]]] = [
    (1, 1, two, {}),
    (2, 2, two, {**UNSHARED, "check_finite": True}),
    (4, 2, two, {"clip_grad_norm": 0.05}),
    (2, 1, two, UNSHARED),
    (3, 2, two, {"clip_grad_value": 0.01}),
    (2, 2, two, {"clip_grad_norm": 0.05, "backend": "inductor"}),
]


@pytest.mark.parametrize(
    ("num_devices", "microbatches", "make", "options"), [*HABITS, *slow(*MORE), *exhaustive(*OTHERS)]
)
def test_updates_are_those_of_one_device_on_all_examples(
    num_devices: int, microbatches: int, make: Optimizers, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    plain = copy.deepcopy(model)
    optimizers, plain_optimizers = make(model), make(plain)
    with compiled_step(model, F.mse_loss, num_devices, optimizers, microbatches=microbatches, **options) as step:
        for sizes in CALLS:
            batches = [(torch.randn(n, 5).double(), torch.randn(n, 3).double()) for n in sizes]
            for x, y in batches[:-1]:
                step.accumulate(x, target=y)
            x, y = batches[-1]
            step(x, target=y)
            for optimizer in plain_optimizers:
                optimizer.zero_grad()
            whole, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
            F.mse_loss(plain(whole), targets).backward()
            if "clip_grad_norm" in options:
                norm = nn.utils.clip_grad_norm_(plain.parameters(), options["clip_grad_norm"])
                torch.testing.assert_close(step.grad_norm, norm)
            if "clip_grad_value" in options:
                nn.utils.clip_grad_value_(plain.parameters(), options["clip_grad_value"])
            for optimizer in plain_optimizers:
                optimizer.step()
            assert_same_parameters(model, plain, 1e-10)
