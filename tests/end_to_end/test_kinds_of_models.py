"""Kinds of layers, losses and batches that people use: each trains as on one device, or is refused in one clear sentence."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import assert_trains_alike, train_step, unchanged
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from twins import Twins, compiled_step, same_each_time

import mirrorc
from mirrorc import CaptureError

SGD = partial(torch.optim.SGD, lr=0.1)
TOLERANCE = 1e-9


class WithMatrices(nn.Module):
    def __init__(self, solve: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.matrix, self.head, self.solve = nn.Linear(4, 16), nn.Linear(4, 3), solve

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix(x).view(-1, 4, 4)
        matrix = matrix @ matrix.mT + 2 * torch.eye(4, dtype=x.dtype)
        return self.head(self.solve(matrix, x.unsqueeze(-1)))


class Words(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table, self.head = table, nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table((x.abs() * 5).long().clamp(max=9)).reshape(len(x), -1, 4).mean(1))


class LooksUp(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.ones(10, 4)), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.factor:
            return F.embedding(x, self.weight * self.factor, sparse=True)
        return F.embedding(x, self.weight, 0, sparse=True) + F.embedding(x, self.weight, sparse=True)


def batch(num_examples: int = 4, width: int = 4, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(num_examples, n, generator=generator, dtype=torch.float64) for n in (width, 3))
    return {"x": x, "target": target}


def between(*layers: nn.Module) -> nn.Module:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.Sequential(*layers), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(x))

    return Layers()


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "inv": lambda: WithMatrices(lambda a, b: (torch.linalg.inv(a) @ b).squeeze(-1)),
    "solve": lambda: WithMatrices(lambda a, b: torch.linalg.solve(a, b).squeeze(-1)),
    "cholesky": lambda: WithMatrices(lambda a, b: (torch.linalg.cholesky(a) @ b).squeeze(-1)),
    "slogdet": lambda: WithMatrices(lambda a, b: torch.linalg.slogdet(a)[1][:, None] * b.squeeze(-1)),
    "bag": lambda: Words(nn.EmbeddingBag(10, 4)),
    "weight_norm": lambda: between(parametrizations.weight_norm(nn.Linear(4, 4))),
    "spectral_norm in eval mode": lambda: between(in_eval_mode(parametrizations.spectral_norm(nn.Linear(4, 4)))),
    "orthogonal": lambda: between(parametrizations.orthogonal(nn.Linear(4, 4))),
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    return same_each_time(lambda: make().double())


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_kinds_of_models_train_as_on_one_device(name: str) -> None:
    batches = [batch(seed=seed) for seed in range(2)]
    assert_trains_alike(seeded(TRAINED[name]), SGD, batches, 2, F.mse_loss, tolerance=TOLERANCE)


def pruned() -> nn.Module:
    layer = nn.Linear(4, 4)
    return prune.l1_unstructured(layer, "weight", amount=0.5)


def in_eval_mode(layer: nn.Module) -> nn.Module:
    layer.parametrizations.eval()
    return layer


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "momentum of None": (lambda: between(nn.BatchNorm1d(4, momentum=None)), batch(), "'layers.0' .*momentum=None.*0.1"),
    "a batch of one": (lambda: between(nn.BatchNorm1d(4)), batch(1), r"MC2104: .*one device.*more than 1 value"),
    "sparse bag": (
        lambda: Words(nn.EmbeddingBag(10, 4, mode="max", sparse=True)),
        batch(),
        "EmbeddingBag 'table' .*sparse=True and mode='max'\n.*\n  fix:  sparse=False",
    ),
    "scaled": (
        lambda: Words(nn.Embedding(10, 4, scale_grad_by_freq=True, sparse=True)),
        batch(),
        "lookup in 'table.weight' of Words .*scale_grad_by_freq=True.*sparse=False",
    ),
    "computed": (lambda: Words(LooksUp(2.0)), batch(), "lookup of Words has sparse=True.*no parameter\n.*\n  fix:  sparse=False"),
    "two paddings": (lambda: Words(LooksUp(0.0)), batch(), "'table.weight' of Words have different values of padding_idx"),
    "weight_norm": (lambda: between(weight_norm(nn.Linear(4, 4))), batch(), "'layers.0' .*WeightNorm.*parametrizations"),
    "spectral_norm": (lambda: between(spectral_norm(nn.Linear(4, 4))), batch(), "'layers.0' .*SpectralNorm.*parametrizations"),
    "pruned": (lambda: between(pruned()), batch(), "'layers.0' .*L1Unstructured.*prune.remove"),
    "shape": (
        lambda: between(nn.Identity()),
        batch(4, 5),
        r"\[2, 5\] X \[4, 3\]\n.*test_kinds_of_models.py:\d+.*\n.*shard, float64\[2, 5\], float64\[2, 3\]\n  fix:",
    ),
}  # fmt: skip


@pytest.mark.slow
def test_what_cannot_be_captured_is_refused_in_a_few_lines(capfd: pytest.CaptureFixture[str]) -> None:
    for name, (make, data, words) in REFUSED.items():
        model = seeded(make)
        optimizer = SGD(model.parameters())
        with (
            unchanged(model, optimizer),
            compiled_step(model, F.mse_loss, optimizer=optimizer, capture="dynamo") as step,
            pytest.raises(CaptureError, match=f"(?s){words}") as caught,
        ):
            step(**data)
        text = "".join(traceback.format_exception(caught.value))
        assert text.count("\n") < 48 and len(str(caught.value)) < 600, f"{name}: {text}"
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:MC2701", "ignore:MC3304", "ignore:MC3207")
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "pruned"])
def test_weights_that_hooks_compute_in_forward_train_as_plain_pytorch(name: str) -> None:
    make, data, _ = REFUSED[name]
    for num_devices in (1, 2, 3):
        model, plain = seeded(make), seeded(make)
        optimizer = SGD(plain.parameters())
        with compiled_step(model, F.mse_loss, num_devices, SGD) as step:
            for _ in range(3):
                step(**data)
                train_step(plain, optimizer, data, F.mse_loss)
        for own, expected in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
            assert torch.allclose(own, expected, rtol=0, atol=TOLERANCE)


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen.numel() == 0:
            self.seen.resize_(3).fill_(2.0)
        return self.layer(x) * self.seen


@pytest.mark.filterwarnings("ignore:MC2701")
def test_a_buffer_that_grows_in_forward_is_refused_until_it_has_its_size() -> None:
    model, data = seeded(Grows), batch()
    words = r"MC2304: .*changes the size of the buffer 'seen'\n.*of \[0\], not \[3\]\n  fix:  model\(x\) on a batch"
    with compiled_step(model, F.mse_loss) as step, pytest.raises(CaptureError, match=words):
        step(**data)
    model(data["x"])
    assert_trains_alike(model, SGD, [data], 2, F.mse_loss, tolerance=TOLERANCE)


def test_the_log_has_the_error_of_the_tracer(caplog: pytest.LogCaptureFixture) -> None:
    make, data, _ = REFUSED["shape"]
    model = seeded(make)
    with (
        caplog.at_level(logging.DEBUG, logger="mirrorc.capture"),
        compiled_step(model, F.mse_loss, optimizer=SGD) as step,
        pytest.raises(CaptureError),
    ):
        step(**data)
    assert "Dynamo failed to run FX node" in caplog.text


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_singular_matrix_stops_the_step_before_it_changes_anything(backend: str) -> None:
    class Inverts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x * self.scale).sum()

    model = Inverts()
    whole = torch.eye(3, dtype=torch.float64).repeat(4, 1, 1)
    broken = whole.clone()
    broken[3, 1, 1] = 0.0
    optimizer = SGD(model.parameters())
    with compiled_step(model, optimizer=optimizer, backend=backend, loss_reduction="sum") as step:
        singular = pytest.raises(mirrorc.MirrorcError, match=r"(?s)linalg.inv failed: a matrix is singular")
        with unchanged(model, optimizer), singular:
            step(broken)
        assert step(whole).item() == 12.0
    assert model.scale.item() == pytest.approx(1.0 + 0.1 * 12.0)


@pytest.mark.slow
def test_embeddings_that_count_are_spoken_of_on_several_devices() -> None:
    """One device gives the update of plain PyTorch, and no word; several give another one, and say so at the line."""

    class Functions(nn.Module):
        def __init__(self, bag: bool) -> None:
            super().__init__()
            self.weight, self.bag = nn.Parameter(torch.randn(5, 3)), bag

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.bag:
                return F.embedding_bag(x, self.weight, mode="sum", scale_grad_by_freq=True)
            return F.embedding(x, self.weight, scale_grad_by_freq=True).sum(1)

    makers: list[tuple[Callable[[], nn.Module], bool]] = [
        (lambda: nn.EmbeddingBag(5, 3, mode="sum", scale_grad_by_freq=True), True),
        (lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), True),
        (lambda: Functions(bag=True), True),
        (lambda: Functions(bag=False), True),
        (lambda: nn.Embedding(5, 3), False),
    ]
    x = torch.tensor([[0, 1], [1, 2], [2, 2], [0, 0]])
    for make, counts in makers:
        for devices in (1, 2):
            torch.manual_seed(0)
            model = nn.Sequential(make()).double()
            with (
                warnings.catch_warnings(record=True) as caught,
                Twins(model, loss_fn=lambda y, t: (y * y).mean(), devices=devices, tolerance=1e-12) as pair,
            ):
                warnings.simplefilter("always")
                pair.train(x, target=x)
            said = [w for w in caught if "scale_grad_by_freq=True" in str(w.message)]
            assert len(said) == (counts and devices == 2), [str(w.message) for w in caught]
            if (devices == 1 and not isinstance(model[0], nn.Embedding)) or not counts:
                pair.check()
