"""Batches of random sizes in a row: each step is that of a program for its sizes, whatever the model does with them."""

import collections
import contextlib
import copy
import dataclasses
import random
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import assert_same_parameters, train_on_one_device, unchanged
from selections import exhaustive, slow
from torch import nn
from twins import batches_of, compiled_step, layers_of_odd_sizes

import mirrorc
from mirrorc import CaptureError
from mirrorc.packing import EqualPacks

WORDS = 40
TOLERANCE = 1e-10

Batch = tuple[torch.Tensor, torch.Tensor]


class Sized(nn.Module):
    fewest = 0

    @staticmethod
    def batch(num_examples: int, length: int) -> Batch:
        return torch.randint(1, WORDS, (num_examples, length)), torch.randint(0, 5, (num_examples,))


class Rows(Sized):
    fewest = 2

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), y)

    @staticmethod
    def batch(num_examples: int, length: int) -> Batch:
        return torch.randn(num_examples, 6, dtype=torch.float64), torch.randint(0, 5, (num_examples,))


class Recurrent(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, 4), nn.Linear(8, 5)
        self.layer = nn.GRU(4, 4, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layer(self.tokens(x))[0].mean(1)), y)


class Masked(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 5)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        is_padded = x > 30
        is_padded = torch.cat([torch.zeros_like(is_padded[:, :1]), is_padded[:, 1:]], 1)
        hidden = self.layer(self.tokens(x), src_key_padding_mask=is_padded).masked_fill(is_padded.unsqueeze(-1), 0)
        return F.cross_entropy(self.head(hidden.sum(1)), y)


class Images(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.halving, self.wide, self.head = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.halving(x))
        if hidden.shape[-1] > 4:
            hidden = F.max_pool2d(F.relu(self.wide(hidden)), 2)
        hidden = F.interpolate(hidden, size=(x.shape[2] // 2, x.shape[3]), mode="bilinear", align_corners=False)
        return F.cross_entropy(self.head(hidden.mean((2, 3))), y)

    @staticmethod
    def batch(num_examples: int, length: int) -> Batch:
        images = torch.randn(num_examples, 3, length + 2, length + 3, dtype=torch.float64)
        return images, torch.randint(0, 5, (num_examples,))


class Bags(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.EmbeddingBag(WORDS, 4, mode="mean"), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.words(x)), y)


class Branching(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        length = int(x.shape[1])
        assert length in range(2, 20)
        hidden = self.tokens(x) * (2 if length > 6 else 1) / length
        return F.cross_entropy(self.head(hidden.view(len(x), length, 2, 2).sum(1).flatten(1)), y)


class Windows(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head, self.places = nn.Embedding(WORDS, 4), nn.Linear(4, 5), nn.Embedding(64, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        hidden = F.pad(self.tokens(x), (0, 0, 0, -length % 4)).unflatten(1, (-1, 4))
        hidden = ((hidden @ hidden.mT).softmax(-1) @ hidden).flatten(1, 2)[:, :length]
        place = torch.arange(length)
        weights = self.places(place[:, None] - place[None, :] + 32).squeeze(-1).tril().softmax(-1)
        hidden = torch.cat([(weights @ hidden)[:, :1], hidden.roll(1, 1)[:, 1:].cumsum(1)], 1)
        return F.cross_entropy(self.head(hidden.amax(1)), y)


class Choosing(Sized):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x)
        return F.cross_entropy(self.head(hidden.mean(1)), y) + hidden[x > 20].square().sum() / len(x)


def sizes_in_a_row(seed: int, fewest: int, count: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    sizes = [(draw.choice([1, 2, 3, 5, 6, 8, 8, 9]), draw.randint(2, 12)) for _ in range(count)]
    fixed = draw.choice([None, None, "examples", "length"])
    return [(max(8 if fixed == "examples" else n, fewest), 5 if fixed == "length" else length) for n, length in sizes]


def losses_of(step: Callable[..., torch.Tensor], model: Sized, sizes: list[tuple[int, int]]) -> list[float]:
    losses = []
    for seed, (num_examples, length) in enumerate(sizes):
        torch.manual_seed(seed)
        losses.append(float(step(*model.batch(num_examples, length)).detach()))
    return losses


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


MODELS: list[type[Sized]] = [Rows, Recurrent, Masked, Images, Bags, Branching, Windows, Choosing]
MANY = [(model, seed % 3 + 1, seed) for model in MODELS for seed in (2, *range(5, 15))]


@pytest.mark.parametrize(
    ("make_model", "num_devices", "seed"), [*((model, 2, 1) for model in MODELS), *exhaustive(*MANY)]
)
def test_sizes_in_any_order_train_as_with_a_program_for_each(
    make_model: type[Sized], num_devices: int, seed: int, quiet: None
) -> None:
    sizes = sizes_in_a_row(seed, make_model.fewest * num_devices, count=5 if seed < 5 else 10)
    found = []
    torch.manual_seed(0)
    original = make_model().double()
    for dynamic in (None, False):
        model = copy.deepcopy(original)
        devices = [f"cpu:{i}" for i in range(num_devices)]
        with compiled_step(
            model, devices=devices, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), dynamic=dynamic
        ) as step:
            losses = losses_of(step, model, sizes)
            found.append((losses, [p.detach().clone() for p in model.parameters()], step._specializer.num_programs))
    (losses, parameters, num_programs), (expected, others, num_sizes) = found
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    torch.testing.assert_close(parameters, others, rtol=TOLERANCE, atol=TOLERANCE)
    assert num_programs <= num_sizes


# Packings, algorithms and placements may change from one step to the next, or from a run to the one that goes on with it.


PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "cut packs": {"buckets": EqualPacks(3)},
    "a ring over copies": {"algorithm": "ring", "link": "copy"},
    "cut packs in a tree": {"algorithm": "tree", "link": "copy", "buckets": EqualPacks(2)},
    "owners": {"placement": "least-loaded"},
}
SIZES = (7, 2, 7, 1, 7, 2)  # some batches have fewer examples than there are devices

ADAM = partial(torch.optim.Adam, lr=0.01)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = layers_of_odd_sizes()
    return model, ADAM(model.parameters())


BATCHES = batches_of(*SIZES, features=7, outputs=3, name="input")


def assert_trained(model: nn.Module) -> None:
    assert_same_parameters(model, train_on_one_device(made()[0], ADAM, BATCHES, F.mse_loss).model)


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer, plan: str) -> mirrorc.Step:
    return compiled_step(model, F.mse_loss, 3, optimizer=optimizer, **PLANS[plan])


@pytest.mark.parametrize("plan", PLANS)
def test_ragged_batches_are_those_of_one_device(plan: str) -> None:
    model, optimizer = made()
    with compiled(model, optimizer, plan) as step:
        for batch in BATCHES:
            step(**batch)
    assert_trained(model)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("one", "other"),
    [("owners", "cut packs in a tree"), *slow(("default", "cut packs"), ("a ring over copies", "owners"))],
)
def test_two_steps_over_one_model_take_turns(one: str, other: str) -> None:
    model, optimizer = made()
    with compiled(model, optimizer, one) as first, compiled(model, optimizer, other) as second:
        for i, batch in enumerate(BATCHES):
            (first, second)[i % 2](**batch)
    assert_trained(model)


@pytest.mark.parametrize(
    ("one", "other"), [("cut packs", "owners"), ("owners", "a ring over copies"), ("cut packs in a tree", "default")]
)
def test_another_plan_goes_on_with_a_checkpoint(one: str, other: str) -> None:
    model, optimizer = made()
    with compiled(model, optimizer, one) as step:
        for batch in BATCHES[:3]:
            step(**batch)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = made()
    with compiled(model, optimizer, other) as step:
        step(**BATCHES[0])  # in the memory of the other plan, too
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        for batch in BATCHES[3:]:
            step(**batch)
    assert_trained(model)


# What forward does to containers that it was passed is refused, or said once, at the user's line.


@dataclasses.dataclass
class TwoTensors:
    hidden: torch.Tensor
    n: int = 0


class Takes(nn.Module):
    def __init__(self, does: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(3, 3), does

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        y = self.layer(x)
        return y + self.does(given, y)


def append(given: Any, y: torch.Tensor) -> torch.Tensor:
    last = given[-1]
    given.append(y.detach())
    return last


def append_to_plain(given: Any, y: torch.Tensor) -> torch.Tensor:
    given.append(1)
    return y * len(given)


def remember(given: Any, y: torch.Tensor) -> torch.Tensor:
    last = given["h"]
    given["h"] = y.detach()
    return last


def count_in_an_empty_dict(given: Any, y: torch.Tensor) -> torch.Tensor:
    n = given.get("n", 0)
    given["n"] = n + 1
    return y * n


def count_in_a_dataclass(given: Any, y: torch.Tensor) -> torch.Tensor:
    given.n += 1
    return y * given.n


def remember_within(given: Any, y: torch.Tensor) -> torch.Tensor:
    given["inner"]["states"][0] = y
    return y


def read_only(given: Any, y: torch.Tensor) -> torch.Tensor:
    return given["h"] * len(given) + sum(value for value in given.values())


def pop_from_its_own(given: Any, y: torch.Tensor) -> torch.Tensor:
    def inner(**kwargs: torch.Tensor) -> torch.Tensor:
        return kwargs.pop("h")

    return inner(**given)


def change_a_copy(given: Any, y: torch.Tensor) -> torch.Tensor:
    given = dict(given)
    given["n"] = 1
    return given.pop("h")


def copy_a_dataclass(given: Any, y: torch.Tensor) -> torch.Tensor:
    return dataclasses.replace(given, n=3).hidden * given.n


def read_what_is_missing(given: Any, y: torch.Tensor) -> torch.Tensor:
    return y * len(given["none"])


def put_back(given: Any, y: torch.Tensor) -> torch.Tensor:
    given["h"] = given["h"]
    return y


def step_once(
    does: Callable[[Any, torch.Tensor], torch.Tensor], given: Any, **options: Any
) -> list[warnings.WarningMessage]:
    model = Takes(does)
    with (
        warnings.catch_warnings(record=True) as caught,
        unchanged(model) if does in REFUSED else contextlib.nullcontext(),
        compiled_step(model, F.mse_loss, **options) as step,
    ):
        warnings.simplefilter("always")
        step(torch.ones(4, 3), given, target=torch.zeros(4, 3))
    return caught


def hidden() -> torch.Tensor:
    return torch.zeros(4, 3)


REFUSED: dict[Callable[[Any, torch.Tensor], torch.Tensor], tuple[list[Callable[[], Any]], str, str]] = {
    append: ([lambda: [hidden()], lambda: collections.deque([hidden()])], "given", "given.append(y.detach())"),
    remember: (
        [lambda: {"h": hidden()}, lambda: collections.OrderedDict(h=hidden())],
        "given",
        'given["h"] = y.detach()',
    ),
    count_in_an_empty_dict: ([dict], "given", 'given["n"] = n + 1'),
    count_in_a_dataclass: ([lambda: TwoTensors(hidden())], "given", "given.n += 1"),
    remember_within: (
        [lambda: {"inner": {"states": [hidden()]}}],
        "given.inner.states",
        'given["inner"]["states"][0] = y',
    ),
}


def test_a_change_of_a_container_among_the_arguments_is_refused_with_its_line() -> None:
    for does, (kinds, name, line) in REFUSED.items():
        for made in kinds:
            with pytest.raises(CaptureError, match="fix:  change a copy") as refused:
                step_once(does, made())
            text = str(refused.value)
            assert re.search(
                rf"changes its argument {name!r}\n  at:   {re.escape(__file__)}:\d+  .*{re.escape(line)}", text
            ), text


@pytest.mark.fast
@pytest.mark.parametrize("given", [[], [1, 2]])
def test_a_list_of_plain_values_among_the_arguments_whose_change_counts_is_not_captured(given: list[int]) -> None:
    before = list(given)
    with pytest.raises(CaptureError, match=r"reads and changes given\n  at:   .*given.append\(1\)"):
        step_once(append_to_plain, given, capture="dynamo")
    assert given == before
    step_once(append_to_plain, given)
    assert given == [*before, 1]


def test_arguments_that_are_only_read_or_copied_are_taken() -> None:
    for does in (read_only, pop_from_its_own, change_a_copy, put_back):
        assert step_once(does, {"h": hidden()}) == []
    assert step_once(copy_a_dataclass, TwoTensors(hidden())) == []
    assert step_once(read_what_is_missing, collections.defaultdict(list, h=hidden())) == []
    assert step_once(read_what_is_missing, collections.defaultdict(str, h=hidden())) == []


@pytest.mark.fast
def test_items_that_are_taken_out_of_an_argument_are_spoken_of() -> None:
    for made, does in (
        ({"h": hidden(), "n": 1}, lambda given, y: given.pop("h")),
        ([hidden()], lambda given, y: given.pop()),
    ):
        (warning,) = step_once(does, made)
        assert "Takes takes items out of its argument 'given', which stay in yours" in str(warning.message)
        assert warning.filename == __file__ and made
