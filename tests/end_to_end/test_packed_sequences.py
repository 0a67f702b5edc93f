"""Sequences that forward packs for a recurrent net train as on one device, whatever their lengths are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import assert_same_training, train_mirrored, train_on_one_device
from selections import thinned
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import mirrorc
from mirrorc import CaptureError, ExecutionError

SGD = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9)
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
TIME = 6


class Tagger(nn.Module):
    """Classifies ragged sequences by all that a recurrent net gives."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, batch_first: bool = True, is_sorted: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.rnn = kind(3, 4, num_layers=2, bidirectional=True, batch_first=batch_first)
        self.head, self.is_sorted = nn.Linear(16, 2), is_sorted

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        batch_first = self.rnn.batch_first
        values = self.first(x) if batch_first else self.first(x).transpose(0, 1)
        packed = pack_padded_sequence(values, lengths, batch_first=batch_first, enforce_sorted=self.is_sorted)
        packed, last = self.rnn(packed)
        output, again = pad_packed_sequence(packed, batch_first, padding_value=0.5, total_length=x.size(1) + 1)
        last = last[1] if isinstance(last, tuple) else last
        mean = output.mean(1 if batch_first else 0)
        return self.head(torch.cat([last[-1], last[-2], mean], 1)) / again.unsqueeze(1)


def batches(lengths: list[int], padding: float = 0.0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    sizes = torch.tensor(lengths)
    beyond = torch.arange(TIME) >= sizes[:, None]
    x = [made(len(lengths), TIME, 3).masked_fill(beyond[..., None], padding) for _ in range(2)]
    return [{"x": one, "lengths": sizes.roll(i), "target": made(len(lengths), 2)} for i, one in enumerate(x)]


@pytest.mark.parametrize(("kind", "batch_first", "num_devices"), thinned([*KINDS], [True, False], [1, 2, 3]))
def test_ragged_sequences_train_as_on_one_device(kind: str, batch_first: bool, num_devices: int) -> None:
    torch.manual_seed(0)
    model, given = Tagger(KINDS[kind], batch_first).double(), batches([2, 6, 1, 3, 5])
    mirrored = train_mirrored(model, SGD, given, num_devices, F.mse_loss)
    assert_same_training(mirrored, train_on_one_device(model, SGD, given, F.mse_loss), 1e-12)


@pytest.mark.slow
def test_compiled_regions() -> None:
    model, given = Tagger().double(), batches([2, 6, 1, 3, 5])
    mirrored = train_mirrored(model, SGD, given, 2, F.mse_loss, backend="inductor")
    assert_same_training(mirrored, train_on_one_device(model, SGD, given, F.mse_loss), 1e-12)


def test_padding_that_is_no_number_has_no_effect() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(3, 2, nonlinearity="relu", batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1][0]

    model, given = Direct().double(), batches([2, 6, 1, 3], padding=float("nan"))
    mirrored = train_mirrored(model, SGD, given[:1], 2, F.mse_loss)
    assert_same_training(mirrored, train_on_one_device(model, SGD, given[:1], F.mse_loss), 1e-12)


def test_a_list_of_sequences_is_packed() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(pack_sequence([*x]))[1][0]

    model, given = Direct().double(), [{"x": b["x"], "target": b["target"]} for b in batches([6, 6, 6])]
    mirrored = train_mirrored(model, SGD, given, 2, F.mse_loss)
    assert_same_training(mirrored, train_on_one_device(model, SGD, given, F.mse_loss), 1e-12)


def test_one_compilation_serves_all_lengths() -> None:
    model = Tagger()
    with mirrorc.compile(model, 2, optimizer=SGD(model.parameters()), loss_fn=F.mse_loss, backend="eager") as step:
        programs = []
        for lengths in ([1, 2, 3], [6, 1, 4]):
            step(torch.randn(3, TIME, 3), torch.tensor(lengths), target=torch.randn(3, 2))
            programs.append(step.program)
    assert programs[0] is programs[1]


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([6, 2, 0, 1], "greater than 0"),
        ([6, 2, 1, 7], "a sequence is said to have 7 items, but the padded tensor has 6"),
        ([2, 6, 1, 1], "must be sorted in decreasing order"),
    ],
)
def test_bad_lengths_stop_the_step(lengths: list[int], text: str) -> None:
    model = Tagger(is_sorted=7 not in lengths)
    before = [p.clone() for p in model.parameters()]
    with mirrorc.compile(model, 2, optimizer=SGD(model.parameters()), loss_fn=F.mse_loss, backend="eager") as step:
        with pytest.raises(ExecutionError, match=text):
            step(torch.randn(4, TIME, 3), torch.tensor(lengths), target=torch.randn(4, 2))
        assert all(map(torch.equal, before, model.parameters()))


def reads(part: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda rnn, x, lengths: part(pack_padded_sequence(x, lengths, True, False))


def pads_to(total_length: int | None) -> Callable[..., torch.Tensor]:
    def pads(rnn: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(rnn(packed)[0], batch_first=True, total_length=total_length)[0].mean(1)

    return pads


@pytest.mark.parametrize(
    ("does", "texts"),
    [
        (pads_to(None), ("pads to the longest sequence of the batch", "total_length=x.size(1)")),
        (pads_to(5), ("total_length=5 is less than 6",)),
        (reads(lambda packed: packed.data), ("the parts of a packed sequence", "compute with the padded tensor")),
        (reads(lambda packed: packed.batch_sizes), ("the parts of a packed sequence",)),
        (reads(lambda packed: packed.sorted_indices), ("the parts of a packed sequence",)),
        (reads(lambda packed: packed.unsorted_indices), ("the parts of a packed sequence",)),
        (reads(lambda packed: [*packed]), ("the parts of a packed sequence",)),
        (
            lambda rnn, x, lengths: pack_padded_sequence(x, [6, 5, 4, 3], True),
            ("pass lengths to the step as a tensor",),
        ),
        (lambda rnn, x, lengths: rnn(PackedSequence(x[0], lengths))[1][0], ("made by hand", "pack_padded_sequence or")),
    ],
)
def test_what_depends_on_the_lengths_is_refused(does: Callable[..., Any], texts: tuple[str, ...]) -> None:
    class Refused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 2, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
            return does(self.rnn, x, lengths)

    model = Refused()
    step = mirrorc.compile(model, 2, optimizer=SGD(model.parameters()), loss_fn=F.mse_loss, backend="eager")
    with step, pytest.raises(CaptureError) as caught:
        step(torch.randn(4, TIME, 3), torch.tensor([6, 1, 1, 2]), target=torch.randn(4, 2))
    assert [text for text in texts if text not in str(caught.value)] == []


def test_a_packed_sequence_as_an_argument_is_refused() -> None:
    model = nn.LSTM(3, 2)
    packed = pack_padded_sequence(torch.randn(4, 4, 3), torch.tensor([4, 3, 2, 1]))
    assert isinstance(packed, PackedSequence)
    options: dict[str, Any] = {"optimizer": SGD(model.parameters()), "backend": "eager"}
    refused = pytest.raises(TypeError, match=r"'input' is a PackedSequence.*call pack_padded_sequence in forward")
    with mirrorc.compile(model, 2, loss_fn=lambda output, target: output[1][0].sum(), **options) as step, refused:
        step(packed, target=torch.randn(4))
