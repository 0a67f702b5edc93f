"""Values that lie in memory otherwise than in order: after dropout, after operators whose fake versions lay them otherwise, in
what ``as_strided`` addresses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import assert_trains_alike, relative_error
from selections import slow
from torch import nn
from twins import compiled_step, same_each_time

from mirrorc import CaptureError, ExecutionError
from mirrorc.ir.nodes import calls_to

SGD = partial(torch.optim.SGD, lr=0.1)
TOLERANCE = 1e-10


class Strided(nn.Module):
    def __init__(self, shape: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.shape = shape
        self.norm.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(torch.tanh(self.layer(self.shape(x, normalized))).flatten(1, -2).mean(1))


class TimeSeriesLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.transpose(1, 2)).transpose(1, 2)
        heads = (*hidden.shape[:2], 2, 4)
        query, key, value = (f(hidden).view(heads).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        hidden = self.second((hidden + self.out(mixed)).transpose(1, 2)).transpose(1, 2)
        return self.head(hidden.view(len(x), -1, 8).mean(1))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    return same_each_time(lambda: make().double())


def batch(*shape: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return {"x": x, "target": torch.randint(3, shape[:1], generator=generator)}


# Dropout


class Dropping(nn.Module):
    def __init__(self, lay: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.lay, self.dropout = lay, nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.dropout(self.lay(x) * self.weight) ** 2).sum()


@pytest.mark.slow
def test_dropout_takes_values_in_any_layout() -> None:
    lays: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.transpose(1, 2),
        lambda x: x.permute(3, 1, 0, 2),
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x[:, ::2, 1:],
        lambda x: x[:, :1].expand(-1, 4, -1, -1),
        lambda x: x.transpose(0, 1)[:1].expand(4, -1, -1, -1).permute(3, 2, 0, 1),
    ]
    x = torch.ones(6, 5, 4, 7, dtype=torch.float64)
    for lay in lays:
        model = Dropping(lay).double()
        with compiled_step(model, optimizer=SGD, loss_reduction="sum") as step:
            loss = step(x).item()
            kept = loss / 4.0  # a kept element is 2
            total = lay(x).numel()
            assert kept == int(kept) and 0.35 < kept / total < 0.65
            # the gradient goes through the same elements: d/dw of (2 w x) ** 2 is 8
            assert model.weight.item() == pytest.approx(1.0 - 0.1 * 8.0 * kept)


@pytest.mark.slow
def test_models_with_dropout_on_values_in_another_layout_train() -> None:
    encoder = seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True))
    convolution = seeded(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout(0.2), nn.Flatten()))
    convolution[0].to(memory_format=torch.channels_last)
    for model, x in ((encoder, torch.randn(4, 5, 8).double()), (convolution, torch.randn(4, 2, 6, 6).double())):
        x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
        loss_fn: Any = lambda output, target: (output.flatten(1) - target).square().mean()  # noqa: E731
        with compiled_step(model, loss_fn, optimizer=SGD) as step:
            losses = [step(x, target=torch.ones(4, 1).double()).item() for _ in range(3)]
        assert losses[2] < losses[0]


# Operators whose results lie otherwise than those of their fake versions


@pytest.mark.slow
def test_no_view_depends_on_the_layout_of_a_normalization() -> None:
    """The operator that normalizes gives its result in the layout of its argument; its fake version gives it contiguous."""
    model = seeded(TimeSeriesLayer)
    for mode in (model.train, model.eval):
        mode()
        batches = [batch(1, 5, 8, seed=seed) if model.training else batch(4, 5, 8, seed=seed) for seed in range(3)]
        devices = 1 if model.training else 2
        assert_trains_alike(model, SGD, batches, devices, F.cross_entropy, tolerance=TOLERANCE)


@pytest.mark.slow
def test_operators_that_need_a_layout_get_it() -> None:
    shapes: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda x, y: torch.view_as_real(torch.view_as_complex(y.reshape(-1, 3, 2, 2).contiguous()) * (1 + 1j)).flatten(
            2
        ),
        lambda x, y: y * y.detach().contiguous().view(torch.int64).ne(0),
    ]
    for shape in shapes:
        check(Strided(shape))


# as_strided


def check(model: nn.Module) -> None:
    model = model.double()
    batches = [batch(4, 3, 4, seed=seed) for seed in range(2)]
    assert_trains_alike(model, SGD, batches, 2, F.cross_entropy, tolerance=TOLERANCE)


@pytest.mark.slow
def test_as_strided_addresses_the_elements_of_its_own_shard() -> None:
    shapes: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda x, y: x.as_strided((len(x), 3, 4), (12, 4, 1)),
        lambda x, y: x.as_strided((len(x), 3, 4), (12, 4, 1), 0),
        lambda x, y: x.as_strided((len(x), 2, 2, 4), (12, 4, 4, 1)),
        lambda x, y: (x * 2)[:, 1:].as_strided((len(x), 2, 4), (12, 4, 1), 0),
        lambda x, y: (x * 2).split([1, 2], 1)[1].as_strided((len(x), 2, 4), (12, 4, 1), 0),
        lambda x, y: (x * 2).unbind(1)[2].as_strided((len(x), 2, 4), (12, 4, 1), 0),
        lambda x, y: torch.as_strided_scatter(x * 2, x[:, :2], (len(x), 2, 4), (12, 4, 1), 4),
    ]
    for shape in shapes:
        check(seeded(lambda shape=shape: Strided(shape)))


def test_a_view_of_another_value_is_addressed_from_its_own_first_element() -> None:
    """With an offset that counts from the first element of what is viewed."""
    model = seeded(lambda: Strided(lambda x, y: (x * 2)[:, 1:].as_strided((len(x), 2, 4), (12, 4, 1))))
    with compiled_step(model, F.cross_entropy, optimizer=SGD) as step:
        data = batch(4, 3, 4)
        expected = F.cross_entropy(model(data["x"]), data["target"]).detach()
        assert relative_error(step(**data), expected) < TOLERANCE
        offsets = [
            node.args[3] for graph in step.program.regions.values()
            for node in calls_to(graph.graph_module.graph, torch.ops.aten.as_strided.default)
        ]  # fmt: skip
        assert offsets and set(offsets) <= {0, 4}


REFUSED: list[tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], type[Exception], str]] = [
    (lambda x, y: x.as_strided((len(x), 3, 4), (12, 4, 1), 1), CaptureError, "not contiguous"),  # one past the end
    (  # in a layout of its own
        lambda x, y: (x.exp().transpose(1, 2) * 2).as_strided((len(x), 3, 4), (12, 4, 1)),
        CaptureError,
        r"MC2508: as_strided .*  at:   test_strides.py:\d+ .* not contiguous.*contiguous\(\)",
    ),
    (  # otherwise than while tracing
        lambda x, y: y.as_strided(y.shape, (12, 4, 1)) if y.is_contiguous() else y,
        ExecutionError,
        r"as_strided.*position in memory.*contiguous_format.*test_strides.py",
    ),
]


@pytest.mark.parametrize(("shape", "error", "words"), [*slow(*REFUSED[:2]), REFUSED[2]])
def test_what_as_strided_cannot_address_is_refused(shape: Any, error: type[Exception], words: str) -> None:
    step = compiled_step(seeded(lambda: Strided(shape)), F.cross_entropy)
    with step, pytest.raises(error, match=f"(?s){words}"):
        step(**batch(4, 3, 4))
