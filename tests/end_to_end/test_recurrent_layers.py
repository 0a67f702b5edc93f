"""nn.LSTM, nn.GRU and nn.RNN train as on one device, with one operator for all layers and directions."""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import (
    assert_same_losses,
    assert_trains_alike,
    train_mirrored,
    train_on_one_device,
)
from selections import exhaustive, slow_but
from torch import nn
from twins import compiled_step

import mirrorc
from mirrorc.ir.program import Program

SGD = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9)
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers of two directions": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "no bias": {"bias": False, "num_layers": 2},
}


class Net(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], has_states: bool = False, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(3, 4, **options)
        layers = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
        outer = self.rnn.proj_size or 4
        self.head = nn.Linear(outer * (2 if self.rnn.bidirectional else 1), 2)
        widths = (outer, 4) if kind is nn.LSTM else (outer,)
        self.first = nn.ParameterList([nn.Parameter(torch.randn(layers, 1, width)) for width in widths if has_states])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = tuple(state.expand(-1, len(x), -1).contiguous() for state in self.first)
        values = x if self.rnn.batch_first else x.transpose(0, 1)
        output, last = self.rnn(values, (first if len(first) > 1 else first[0]) if first else None)
        output = output if self.rnn.batch_first else output.transpose(0, 1)
        ends = last if isinstance(last, tuple) else (last,)
        return self.head(output).mean(1) + sum(end.square().mean((0, 2)) for end in ends).unsqueeze(1)


def batches(num_examples: int = 6, dtype: torch.dtype = torch.float64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = functools.partial(torch.randn, generator=generator, dtype=dtype)
    return [{"x": made(num_examples, 6, 3), "target": made(num_examples, 2)} for _ in range(2)]


USUAL = [("LSTM", "two layers of two directions", 2), ("GRU", "no bias", 1), ("RNN", "plain", 3)]
USUAL += [case for case in list(product(KINDS, OPTIONS, (2,)))[::2] if case not in USUAL]
OTHERS = [case for case in product(KINDS, OPTIONS, (1, 2, 3)) if case not in USUAL]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options", "num_devices"), [*USUAL, *exhaustive(*OTHERS)])
def test_training_is_that_of_one_device(kind: str, options: str, num_devices: int) -> None:
    torch.manual_seed(0)
    model = Net(KINDS[kind], has_states=num_devices == 2, **OPTIONS[options]).double()
    assert_trains_alike(model, SGD, batches(), num_devices, F.mse_loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"), [("LSTM", {"proj_size": 2, "num_layers": 2}), ("RNN", {"nonlinearity": "relu"})]
)
def test_projections_and_relu(kind: str, options: dict[str, Any]) -> None:
    model = Net(KINDS[kind], **options).double()
    assert_trains_alike(model, SGD, batches(), 2, F.mse_loss)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_compiled_regions(dtype: torch.dtype, tolerance: float) -> None:
    model = Net(nn.LSTM, num_layers=2).to(dtype)
    assert_trains_alike(model, SGD, batches(dtype=dtype), 2, F.mse_loss, tolerance=tolerance, backend="inductor")


def targets(program: Program) -> list[str]:
    graphs = [region.graph_module.graph for region in program.regions.values()]
    return [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_layers_are_one_operator_however_long_the_sequences_are(kind: str, dropout: float) -> None:
    """Dropout is between two operators, for which the graph draws its numbers."""
    model = Net(KINDS[kind], num_layers=2, bidirectional=True, dropout=dropout)
    with compiled_step(model, F.mse_loss, 1, optimizer=SGD) as step:
        programs = []
        for time in (3, 300):
            step(torch.randn(2, time, 3), target=torch.randn(2, 2))
            programs.append(targets(step.programs[-1]))
    counts = [programs[1].count(f"mirrorc.recurrent{end}.default") for end in ("", "_backward")]
    assert counts == ([2, 2] if dropout else [1, 1])
    assert programs[0] == programs[1]


@pytest.mark.slow
def test_dropout_between_layers_follows_torchs_seed() -> None:
    def losses(seed: int) -> list[float]:
        torch.manual_seed(0)
        model = Net(nn.GRU, num_layers=3, dropout=0.5).double()
        torch.manual_seed(seed)
        same = [batches()[0]] * 2
        return train_mirrored(model, functools.partial(torch.optim.SGD, lr=0.0), same, 2, F.mse_loss).losses

    first, again, other = losses(1), losses(1), losses(2)
    assert first == again and first[0] != first[1] and first != other


@pytest.mark.parametrize("kind", slow_but(["LSTM"], KINDS))
def test_autocast(kind: str) -> None:
    torch.manual_seed(0)
    model, dtypes = Net(KINDS[kind], batch_first=True), []

    class Inside(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                output, last = self.rnn(x)
                dtypes.append([output.dtype, *(end.dtype for end in (last if isinstance(last, tuple) else (last,)))])
                return self.head(output).mean(1).float()

    model.__class__ = Inside
    given = batches(dtype=torch.float32)[:1]
    try:
        expected = train_on_one_device(model, SGD, given, F.mse_loss)
    except RuntimeError as error:
        assert "could not create a primitive" in str(error)
        pytest.skip("torch itself has no such layer of bfloat16 on this processor")
    plain = dtypes[0]
    dtypes.clear()
    with pytest.warns(UserWarning, match="changes dtypes"):
        assert_same_losses(train_mirrored(model, SGD, given, 2, F.mse_loss), expected, 0.03)
    assert all(found == plain for found in dtypes)


@pytest.mark.slow
def test_last_states_lie_with_their_examples_in_dim_1() -> None:
    model = nn.LSTM(3, 4, num_layers=2, batch_first=True)

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output[0], target)

    x = torch.randn(4, 5, 3)
    expected = model(x)
    with compiled_step(model, loss_fn, optimizer=SGD, return_outputs=True) as step:
        _, (hidden, (last, _)) = step(x, target=torch.randn(4, 5, 4))
    torch.testing.assert_close(hidden, expected[0].detach())
    assert isinstance(last, mirrorc.PerReplica)
    torch.testing.assert_close(torch.cat([*last.values], 1), expected[1][0].detach())


def test_sequences_without_items_are_refused() -> None:
    model = Net(nn.GRU)
    refused = pytest.raises(mirrorc.CaptureError, match="sequence length to be larger than 0")
    with compiled_step(model, F.mse_loss, 1, optimizer=SGD) as step, refused:
        step(torch.randn(2, 0, 3), target=torch.randn(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_time_is_never_split(kind: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3)
            self.first, self.second = nn.LSTM(3, 2, bidirectional=True), getattr(nn, kind)(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(self.table(x).relu() * 2)[0])[0]

    class Turned(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.transpose(0, 1)).transpose(0, 1)

    x, target = torch.randint(0, 5, (4, 6)), torch.randn(4, 6, 2)
    for make, num_devices, is_refused in ((Net, 2, True), (Net, 1, False), (Turned, 2, False)):
        model = make()
        with compiled_step(model, F.mse_loss, num_devices) as step:
            if not is_refused:
                assert step(x, target=target).isfinite()
                continue
            for call in (step, step.evaluate):
                with pytest.raises(mirrorc.CaptureError, match="Net takes dim 0 of argument 'x' as time"):
                    call(x, target=target)
