"""Sequences that forward packs for a recurrent net train as on one device, whatever their lengths are."""

import functools
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import assert_same_losses, assert_trains_alike, refused, train_mirrored, train_on_one_device
from selections import exhaustive, slow_but
from small_modules import Parts
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, unpack_sequence
from twins import Twins, compiled_step

import mirrorc
from mirrorc import CaptureError, ExecutionError
from mirrorc.ir.program import Program

SGD = functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9)
KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
TIME = 6


class Tagger(nn.Module):
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


def batches(lengths: list[int], padding: float = 0.0, time: int = TIME) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    sizes = torch.tensor(lengths)
    beyond = torch.arange(time) >= sizes[:, None]
    x = [made(len(lengths), time, 3).masked_fill(beyond[..., None], padding) for _ in range(2)]
    return [{"x": one, "lengths": sizes.roll(i), "target": made(len(lengths), 2)} for i, one in enumerate(x)]


@pytest.mark.parametrize(
    ("kind", "batch_first", "num_devices"),
    [
        ("LSTM", True, 3),
        ("GRU", False, 2),
        ("RNN", True, 1),
        ("RNN", False, 2),
        *exhaustive(("LSTM", False, 1), ("GRU", True, 3)),
    ],
)
def test_ragged_sequences_train_as_on_one_device(kind: str, batch_first: bool, num_devices: int) -> None:
    torch.manual_seed(0)
    model, given = Tagger(KINDS[kind], batch_first).double(), batches([2, 6, 1, 3, 5])
    assert_trains_alike(model, SGD, given, num_devices, F.mse_loss)


class Continued(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], batch_first: bool, is_sorted: bool, is_packed: bool = False) -> None:
        super().__init__()
        self.rnn = kind(3, 4, num_layers=2, bidirectional=True, batch_first=batch_first)
        self.cell, self.is_sorted, self.is_packed = nn.Parameter(torch.randn(4, 1, 4)), is_sorted, is_packed

    def forward(self, x: Any, lengths: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        batch_first, first = self.rnn.batch_first, state.transpose(0, 1).contiguous()
        if not self.is_packed:
            values = x if batch_first else x.transpose(0, 1)
            x = pack_padded_sequence(values, lengths, batch_first=batch_first, enforce_sorted=self.is_sorted)
        is_lstm = isinstance(self.rnn, nn.LSTM)
        packed, last = self.rnn(x, (first, self.cell.expand(4, len(lengths), 4).contiguous()) if is_lstm else first)
        output, _ = pad_packed_sequence(packed, batch_first, total_length=TIME)
        last = last[0] * last[1] if isinstance(last, tuple) else last
        return torch.cat([*last, output.sum(1 if batch_first else 0)], 1)


@pytest.mark.parametrize(
    ("kind", "batch_first", "is_sorted", "is_packed", "num_devices"),
    [
        ("GRU", True, False, False, 2),
        ("LSTM", False, False, True, 2),
        ("RNN", False, True, False, 3),
        ("LSTM", True, True, False, 1),
        ("GRU", False, False, True, 3),
    ],
)
def test_first_states_go_with_their_sequences(
    kind: str, batch_first: bool, is_sorted: bool, is_packed: bool, num_devices: int
) -> None:
    torch.manual_seed(0)
    model = Continued(KINDS[kind], batch_first, is_sorted, is_packed).double()
    given: list[dict[str, Any]] = []
    for one in batches([6, 4, 3, 2, 1] if is_sorted else [2, 6, 1, 3, 5])[: 1 if is_sorted else 2]:
        x = pack_padded_sequence(one["x"], one["lengths"], True, False) if is_packed else one["x"]
        size = {"dtype": torch.float64}
        given.append({**one, "x": x, "state": torch.randn(5, 4, 4, **size), "target": torch.randn(5, 24, **size)})
    assert_trains_alike(model, SGD, given, num_devices, F.mse_loss)


def test_compiled_regions() -> None:
    assert_trains_alike(Tagger().double(), SGD, batches([2, 6, 1, 3, 5]), 2, F.mse_loss, backend="inductor")


class Direct(Parts):
    def __init__(self, rnn: nn.RNNBase, pack: Callable[..., Any]) -> None:
        super().__init__(rnn=rnn, pack=pack)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.rnn(self.pack(*args, **kwargs))[1][0]


def packs(x: torch.Tensor, lengths: torch.Tensor) -> PackedSequence:
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


def test_padding_that_is_no_number_has_no_effect_and_a_list_of_sequences_is_packed() -> None:
    padded = Direct(nn.RNN(3, 2, nonlinearity="relu", batch_first=True), packs).double()
    assert_trains_alike(padded, SGD, batches([2, 6, 1, 3], padding=float("nan"))[:1], 2, F.mse_loss)
    listed = Direct(nn.GRU(3, 2), lambda x: pack_sequence([*x])).double()
    given = [{"x": batch["x"], "target": batch["target"]} for batch in batches([6, 6, 6])]
    assert_trains_alike(listed, SGD, given, 2, F.mse_loss)


def test_one_compilation_serves_all_lengths() -> None:
    model = Tagger()
    with compiled_step(model, F.mse_loss, optimizer=SGD) as step:
        programs = []
        for lengths in ([1, 2, 3], [6, 1, 4]):
            step(torch.randn(3, TIME, 3), torch.tensor(lengths), target=torch.randn(3, 2))
            programs.append(step.programs[-1])
    assert programs[0] is programs[1]


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([6, 2, 1, 7], "a sequence is said to have 7 items, but the padded tensor has 6"),
        ([6, 2, 0, 1], "greater than 0"),
        ([2, 6, 1, 1], "must be sorted in decreasing order"),
    ],
)
def test_bad_lengths_stop_the_step(lengths: list[int], text: str) -> None:
    model = Tagger(is_sorted=7 not in lengths)
    with compiled_step(model, F.mse_loss, optimizer=SGD) as step, refused(ExecutionError, text, model):
        step(torch.randn(4, TIME, 3), torch.tensor(lengths), target=torch.randn(4, 2))


def reads(part: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda rnn, x, lengths: part(pack_padded_sequence(x, lengths, True, False))


def pads_to(total_length: int | None) -> Callable[..., torch.Tensor]:
    def pads(rnn: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(rnn(packed)[0], batch_first=True, total_length=total_length)[0].mean(1)

    return pads


@pytest.mark.fast
@pytest.mark.parametrize(
    ("does", "texts"),
    [
        (pads_to(None), ("pads to the longest sequence of the batch", "total_length=x.size(1)")),
        (reads(lambda packed: packed.data), ("the parts of a packed sequence", "compute with the padded tensor")),
        (reads(lambda packed: packed.batch_sizes), ("the parts of a packed sequence",)),
        (reads(lambda packed: packed.sorted_indices), ("the parts of a packed sequence",)),
        (reads(lambda packed: packed.unsorted_indices), ("the parts of a packed sequence",)),
        (reads(lambda packed: [*packed]), ("the parts of a packed sequence",)),
        (lambda rnn, x, lengths: pack_padded_sequence(x, [6, 5, 4, 3], True), ("pass lengths as a tensor",)),
        (lambda rnn, x, lengths: rnn(PackedSequence(x[0], lengths))[1][0], ("made by hand", "pack_padded_sequence or")),
    ],
)
def test_what_depends_on_the_lengths_is_refused(does: Callable[..., Any], texts: tuple[str, ...]) -> None:
    class Refused(Parts):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
            return does(self.rnn, x, lengths)

    model = Refused(rnn=nn.LSTM(3, 2, batch_first=True))
    step = compiled_step(model, F.mse_loss, optimizer=SGD)
    with step, pytest.raises(CaptureError) as caught:
        step(torch.randn(4, TIME, 3), torch.tensor([6, 1, 1, 2]), target=torch.randn(4, 2))
    assert [text for text in texts if text not in str(caught.value)] == []


class OfPacked(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], total_length: int) -> None:
        super().__init__()
        self.rnn = kind(3, 4, num_layers=2, bidirectional=True)
        self.head, self.total_length = nn.Linear(16, 2), total_length

    def forward(self, packed: PackedSequence) -> Any:
        assert isinstance(packed, PackedSequence)
        assert isinstance(packed, (nn.Module, tuple)), "it is a tuple"
        packed, last = self.rnn(packed)
        output, again = pad_packed_sequence(packed, batch_first=True, total_length=self.total_length)
        last = last[1] if isinstance(last, tuple) else last
        return self.head(torch.cat([last[-1], last[-2], output.mean(1)], 1)) / again.unsqueeze(1), packed


def packed_batches(lengths: list[int], is_sorted: bool) -> list[dict[str, Any]]:
    return [
        {
            "packed": pack_padded_sequence(b["x"], b["lengths"], batch_first=True, enforce_sorted=is_sorted),
            "target": b["target"],
        }
        for b in batches(lengths, time=max(lengths))[: 1 if is_sorted else 2]
    ]


def loss_of_first(output: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[0], target)


@pytest.mark.parametrize(
    ("kind", "is_sorted", "num_devices"), [("LSTM", True, 4), ("GRU", False, 3), ("GRU", False, 1), ("LSTM", False, 2)]
)
def test_packed_sequences_are_split_by_sequences(kind: str, is_sorted: bool, num_devices: int) -> None:
    torch.manual_seed(0)
    model = OfPacked(KINDS[kind], total_length=5).double()
    for lengths in ([5, 4, 4, 3, 1], [4, 2, 1]) if is_sorted else ([2, 5, 1, 3, 4],):
        given = packed_batches(lengths, is_sorted)
        assert_trains_alike(model, SGD, given, num_devices, loss_of_first)


def test_packed_sequences_come_back_as_such_and_few_shapes_are_compiled() -> None:
    model = OfPacked(nn.GRU, total_length=10).double()
    lengths = [[10, 1, 2], [1, 3, 9]]  # nine items are padded to the shape of ten
    with compiled_step(model, loss_of_first, return_outputs=True) as step:
        for batch in [packed_batches(own, is_sorted=False)[0] for own in lengths]:
            expected = model(batch["packed"])[1]
            found = step(**batch)[1][1]
            assert type(found) is PackedSequence
            torch.testing.assert_close([*found], [*expected], rtol=0, atol=1e-12)
        assert "1 compiled program" in repr(step)


def test_packed_sequences_of_replicas_and_whole_ones() -> None:
    class Both(Parts):
        def forward(self, own: PackedSequence, shared: PackedSequence) -> Any:
            last = self.rnn(own)[1][0]
            return last, self.rnn(own)[0], self.rnn(shared)[0], own

    model = Both(rnn=nn.GRU(3, 2)).double()
    first, second = (batch["packed"] for batch in packed_batches([2, 3], is_sorted=False))
    expected = [model(one, second) for one in (first, second)]
    with compiled_step(model, loss_of_first, return_outputs=True) as step:
        given = mirrorc.PerReplica([first, second]), mirrorc.replicated(second)
        _, (last, packed, shared, own) = step(*given, target=torch.zeros(4, 2, dtype=torch.float64))
    torch.testing.assert_close(last, torch.cat([found[0] for found in expected]))
    wanted = pack_sequence([s for found in expected for s in unpack_sequence(found[1])], enforce_sorted=False)
    torch.testing.assert_close([*packed], [*wanted])
    assert all(torch.allclose(found.data, expected[0][2].data) for found in shared.values)
    for one, found in zip((first, second), own.values, strict=True):
        torch.testing.assert_close([*found], [*one], rtol=0, atol=0)


@pytest.mark.fast
def test_a_loss_of_packed_sequences_is_checked() -> None:
    batch = packed_batches([2, 6, 1, 3], is_sorted=False)[0]
    model = OfPacked(nn.GRU, total_length=6).double()
    assert mirrorc.check_loss(model, **batch, loss_fn=loss_of_first, num_replicas=2).same


def test_a_length_beyond_the_padded_one_stops_the_step() -> None:
    model = OfPacked(nn.GRU, total_length=5).double()
    with compiled_step(model, loss_of_first) as step:
        step(**packed_batches([2, 5, 1, 3], is_sorted=False)[0])
        with pytest.raises(ExecutionError, match="a sequence is said to have 6 items, but the padded tensor has 5"):
            step(**packed_batches([2, 6, 1, 3], is_sorted=False)[0])


class Last(Parts):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__(rnn=kind(3, 5, batch_first=True))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        _, last = self.rnn(packs(x, lengths))
        return (last[0] if isinstance(last, tuple) else last)[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_values_have_the_types_of_plain_pytorch(kind: str) -> None:
    torch.manual_seed(0)
    x, lengths, y = torch.randn(4, TIME, 3), torch.tensor([6, 3, 2, 5]), torch.randn(4, 5)
    options: dict[str, Any] = {"autocast": torch.bfloat16, "return_outputs": True}
    make = partial(torch.optim.SGD, lr=1.0)
    with Twins(Last(KINDS[kind]), make, lambda o, t: F.mse_loss(o.float(), t), 1, **options) as pair:
        with torch.autocast("cpu", torch.bfloat16):
            expected = pair.twin(x, lengths)
            pair.plain(x, lengths, target=y)
        _, found = pair.step(x, lengths, target=y)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected.detach(), rtol=0.02, atol=0.005)
        torch.testing.assert_close([*pair.model.parameters()], [*pair.twin.parameters()], rtol=0.02, atol=0.005)


# nn.LSTM, nn.GRU and nn.RNN train as on one device, with one operator for all layers and directions.


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers of two directions": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "no bias": {"bias": False, "num_layers": 2},
}


class Net(Parts):
    def __init__(self, kind: type[nn.RNNBase], has_states: bool = False, **options: Any) -> None:
        super().__init__(rnn=kind(3, 4, **options))
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


def sequences(num_examples: int = 6, dtype: torch.dtype = torch.float64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = functools.partial(torch.randn, generator=generator, dtype=dtype)
    return [{"x": made(num_examples, 6, 3), "target": made(num_examples, 2)} for _ in range(2)]


USUAL = [("LSTM", "two layers of two directions", 2), ("GRU", "no bias", 1), ("RNN", "plain", 3)]
USUAL += [case for case in list(product(KINDS, OPTIONS, (2,)))[::2] if case not in USUAL]
OTHERS = [case for case in product(KINDS, OPTIONS, (1, 2, 3)) if case not in USUAL]


@pytest.mark.parametrize(("kind", "options", "num_devices"), [*USUAL, *exhaustive(*OTHERS)])
def test_training_is_that_of_one_device(kind: str, options: str, num_devices: int) -> None:
    torch.manual_seed(0)
    model = Net(KINDS[kind], has_states=num_devices == 2, **OPTIONS[options]).double()
    assert_trains_alike(model, SGD, sequences(), num_devices, F.mse_loss)


@pytest.mark.parametrize(
    ("kind", "options"), [("LSTM", {"proj_size": 2, "num_layers": 2}), ("RNN", {"nonlinearity": "relu"})]
)
def test_projections_and_relu(kind: str, options: dict[str, Any]) -> None:
    model = Net(KINDS[kind], **options).double()
    assert_trains_alike(model, SGD, sequences(), 2, F.mse_loss)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_compiled_regions_of_layers(dtype: torch.dtype, tolerance: float) -> None:
    model = Net(nn.LSTM, num_layers=2).to(dtype)
    assert_trains_alike(model, SGD, sequences(dtype=dtype), 2, F.mse_loss, tolerance=tolerance, backend="inductor")


def targets(program: Program) -> list[str]:
    graphs = [region.graph_module.graph for region in program.regions.values()]
    return [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]


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


def test_dropout_between_layers_follows_torchs_seed() -> None:
    def losses(seed: int) -> list[float]:
        torch.manual_seed(0)
        model = Net(nn.GRU, num_layers=3, dropout=0.5).double()
        torch.manual_seed(seed)
        same = [sequences()[0]] * 2
        return train_mirrored(model, functools.partial(torch.optim.SGD, lr=0.0), same, 2, F.mse_loss).losses

    first, again, other = losses(1), losses(1), losses(2)
    assert first == again and first[0] != first[1] and first != other


@pytest.mark.fast
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
    given = sequences(dtype=torch.float32)[:1]
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


@pytest.mark.fast
def test_sequences_without_items_are_refused() -> None:
    model = Net(nn.GRU)
    refused = pytest.raises(mirrorc.CaptureError, match="sequence length to be larger than 0")
    with compiled_step(model, F.mse_loss, 1, optimizer=SGD) as step, refused:
        step(torch.randn(2, 0, 3), target=torch.randn(2, 2))


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
