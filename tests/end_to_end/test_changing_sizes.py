"""Batches of random sizes in a row: each step is that of a program for its sizes, whatever the model does with them."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from selections import exhaustive
from torch import nn
from torch.nn import functional as F
from twins import compiled_step

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


@pytest.mark.slow
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
