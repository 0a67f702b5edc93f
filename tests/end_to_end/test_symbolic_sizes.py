"""Sizes of arguments that change become symbols of one program, which trains as plain PyTorch does, whatever the sizes are."""

import copy
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_steps import step_of_world
from references import assert_same_parameters
from selections import exhaustive, slow
from small_modules import Parts
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc.compilation.call_kind import Purpose
from mirrorc.errors import MirrorcError
from mirrorc.ir.program import Program
from mirrorc.verifier.verifier import verify

WORDS = 40
TOLERANCE = 1e-12


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, 16), nn.Embedding(64, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.tokens(x) + self.places(torch.arange(x.size(1))))
        return F.cross_entropy(self.head(hidden).view(-1, WORDS), y.reshape(-1))


class CausalAttention(Parts):
    def __init__(self) -> None:
        super().__init__(tokens=nn.Embedding(WORDS, 16), mixed=nn.Linear(16, 48), head=nn.Linear(16, WORDS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape
        q, k, v = self.mixed(self.tokens(x)).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(8) / length).masked_fill(later, -torch.inf).softmax(-1)
        hidden = (weights @ v).transpose(1, 2).reshape(batch, length, 16)
        return F.cross_entropy(self.head(hidden).transpose(1, 2), y, reduction="sum") / y.numel()


class Classifier(Parts):
    def __init__(self) -> None:
        super().__init__(tokens=nn.Embedding(WORDS, 16), hidden=nn.Linear(16, 32), head=nn.Linear(32, 5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        is_word = (x != 0).unsqueeze(-1)
        hidden = torch.tanh(self.hidden(self.tokens(x)))
        pooled = (hidden * is_word).sum(1) / is_word.sum(1).clamp(min=1) + hidden.amax(1) + hidden.mean(1)
        return F.cross_entropy(self.head(pooled), y[:, 0] % 5)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.narrow = nn.Embedding(WORDS, 16), nn.Conv1d(16, 32, 3, padding=1)
        self.halving, self.head = nn.Conv1d(32, 16, 4, stride=2, padding=2), nn.Linear(48, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.halving(F.relu(self.narrow(self.tokens(x).transpose(1, 2)))))
        if x.size(1) > 20:
            hidden = hidden * 2
        return F.cross_entropy(self.head(F.adaptive_avg_pool1d(hidden, 3).flatten(1)), y[:, 0] % 5)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer = nn.Embedding(WORDS, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, WORDS)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.layer(self.tokens(x))[0]).flatten(0, 1), y.flatten())


class Wide(Parts):
    def __init__(self) -> None:
        super().__init__(tokens=nn.Embedding(3000, 64), up=nn.Linear(64, 2100), down=nn.Linear(2100, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.down(F.gelu(self.up(self.tokens(x * 70)))).flatten(0, 1), y.flatten() % 8)


def text(batch: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the same shifted by one: views of one tensor, with gaps."""
    words = torch.randint(1, WORDS, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    return words[:, :-1], words[:, 1:]


def random_sizes(count: int, seed: int) -> list[tuple[int, int]]:
    chosen = random.Random(seed)
    return [(chosen.choice([4, 6, 7, 9, 12]), chosen.randint(2, 40)) for _ in range(count)]


def trained_beside_plain_pytorch(
    make_model: Callable[[], nn.Module], sizes: Sequence[tuple[int, int]], num_devices: int = 1, **options: Any
) -> tuple[mirrorc.Step, Program]:
    """Trains twins on the same batches, and compares them after each; gives the step and its last program."""
    torch.manual_seed(0)
    make_optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    options = {"dynamic": None, "tolerance": TOLERANCE, **options}
    pair = Twins(make_model().double(), make_optimizer, devices=num_devices, **options)
    for i, size in enumerate(sizes):
        x, y = text(*size, i)
        assert abs(pair.step(x, y) - pair.plain(x, y)) < TOLERANCE
        assert_same_parameters(pair.model, pair.twin, TOLERANCE)
    return pair.step, pair.step.prepare(*text(*sizes[-1]))


def num_programs(step: mirrorc.Step) -> int:
    return step._specializer.num_programs


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


MODELS = [Tagger, CausalAttention, Classifier, Convolutions, Recurrent, Wide]
USUAL = [(model, 2) for model in MODELS]
RARE = [(model, count) for model in MODELS for count in (1, 3)]


@pytest.mark.parametrize(("make_model", "num_devices"), [*USUAL, *exhaustive(*RARE)])
def test_a_step_is_that_of_plain_pytorch_whatever_the_sizes(
    make_model: Callable[[], nn.Module], num_devices: int, quiet: None
) -> None:
    trained_beside_plain_pytorch(make_model, random_sizes(6, num_devices), num_devices)


LENGTHS = random.Random(1).sample(range(2, 60), 30)
COUNTED: dict[str, tuple[Any, list[tuple[int, int]], int, dict[str, Any], int, str]] = {
    "thirty lengths and five batch sizes": (
        Classifier,
        [(8, 5), *(([8, 12, 6, 4, 10][i % 5], length) for i, length in enumerate(LENGTHS))],
        2, {}, 3, "x: i64[s0, s1]",
    ),
    "from the first call on": (Classifier, random_sizes(6, 3), 2, {"dynamic": True}, 1, "x: i64[s0, s1]"),
    "no symbols": (Classifier, [(4, 5), (4, 6), (4, 7)], 1, {"dynamic": False}, 3, "x: i64[4, 7]"),
    "uneven shards and a last short batch": (
        Classifier, [(8, 5), (8, 5), (7, 5), (8, 5), (7, 5)], 2, {}, 2, "x: i64[s0, 5]",
    ),
    "batches of the first size have their own": (Classifier, [(8, 5), (7, 5), (8, 5)], 2, {}, 2, "x: i64[4, 5]"),
    "a size of one": (Classifier, [(4, 5), (4, 1), (1, 5), (4, 5)], 1, {}, 3, "x: i64[4, 5]"),
    "a branch on a size, which a guard keeps apart": (
        Convolutions, [(4, 10), (4, 12), (4, 14), (4, 30), (4, 31), (4, 11), (4, 33)], 1, {}, 3, "s0",
    ),
    "a size that the model fixes; views have gaps": (
        lambda: Sized(6), [(4, 6), (6, 6), (8, 6)], 1, {"dynamic": True}, 2, "x: i64[s0, 6]",
    ),
    "a size that Python counts with": (lambda: Looping(), [(4, 3), (4, 4), (4, 5), (4, 6), (4, 4)], 1, {}, 4, ""),
    "in compiled regions": (
        Classifier, [(4, 5), (4, 17), (6, 9), (8, 30)], 2,
        {"backend": "inductor", "dynamic": True}, 1, "s0",
    ),
    "lengths of microbatches": (
        Classifier, [(8, 5), (8, 9), (8, 4)], 2, {"microbatches": 4, "dynamic": True}, 1, "x: i64[4, s0]",
    ),
}  # fmt: skip
"""A model, sizes of batches, devices, options; how many programs there are, and what the last one's text has."""


@pytest.mark.parametrize("case", COUNTED)
def test_sizes_are_symbols_of_few_programs(case: str, quiet: None) -> None:
    make_model, sizes, num_devices, options, num_compiled, words = COUNTED[case]
    step, program = trained_beside_plain_pytorch(make_model, sizes, num_devices, **options)
    assert num_programs(step) <= num_compiled if "views" in case else num_programs(step) == num_compiled
    assert words in program.to_text() and ("s0" in words or not words or "s0" not in program.to_text())


class Gathering(Parts):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = F.normalize(self.left(x).mean(1), dim=1), F.normalize(self.right(y).mean(1), dim=1)
        return ((left @ mirrorc.all_gather(right).T).logsumexp(1) - (left * right).sum(1)).mean()


@pytest.mark.fast
def test_shards_of_other_sizes_that_gather_have_graphs_of_their_own(quiet: None) -> None:
    torch.manual_seed(0)
    model = Gathering(left=nn.Embedding(WORDS, 4), right=nn.Embedding(WORDS, 4)).double()
    other = copy.deepcopy(model)
    with compiled_step(model, devices=2) as step, compiled_step(other, devices=2, dynamic=False) as numbers:
        for size in [(8, 3), (5, 3), (8, 3), (7, 3)]:
            assert float(step(*text(*size))) == float(numbers(*text(*size)))
    assert_same_parameters(model, other, 0.0)


class Sized(Parts):
    def __init__(self, length: int) -> None:
        super().__init__(tokens=nn.Embedding(WORDS, 4), head=nn.Linear(4 * length, 5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.tokens(x).flatten(1)), y[:, 0] % 5)


class Looping(Parts):
    def __init__(self) -> None:
        super().__init__(tokens=nn.Embedding(WORDS, 4), head=nn.Linear(4, 5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(len(x), 4, dtype=self.head.weight.dtype)
        for place in range(x.size(1)):
            hidden = torch.tanh(hidden + self.tokens(x[:, place]))
        return F.cross_entropy(self.head(hidden) / x.size(1), y[:, 0] % 5)


class Returning(Parts):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.tokens(x))
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten() % 5)
        return {"loss": loss, "logits": logits, "last": logits[:, -1], "mean": logits.mean()}


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_outputs_have_the_sizes_of_the_call(num_devices: int) -> None:
    torch.manual_seed(0)
    model = Returning(tokens=nn.Embedding(WORDS, 4), head=nn.Linear(4, 5)).double()
    step = compiled_step(model, devices=num_devices, return_outputs=True, dynamic=None)
    for size in [(8, 5), (8, 7), (12, 9), (7, 11)]:
        x, y = text(*size)
        with torch.no_grad():
            expected = model(x, y)
        for _, found in (step.evaluate(x, y), step(x, y)):
            torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_marked_dimension_is_a_symbol_from_the_first_call_on() -> None:
    step, _ = step_of(Classifier)
    x, y = text(4, 6)
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.mark_dynamic(y, 1)
    step(x, y)
    step(*text(4, 9))
    assert num_programs(step) == 1
    assert "x: i64[4, s0]" in step.prepare(*text(4, 9)).to_text()


@pytest.mark.fast
def test_a_marked_dimension_of_size_one_is_told() -> None:
    step, _ = step_of(Classifier)
    x, y = text(4, 1)
    torch._dynamo.mark_dynamic(x, 1)
    with pytest.warns(UserWarning, match=r"dim 1 of argument 'x' is marked .*, and its size is 1"):
        step(x, y)


def step_of(make_model: Callable[[], nn.Module], **options: Any) -> tuple[mirrorc.Step, nn.Module]:
    torch.manual_seed(0)
    model = make_model()
    return compiled_step(model, devices=1, **{"dynamic": None, **options}), model


@pytest.mark.fast
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"activations": "50%"}, r"Memory\(activations=\) bounds what a step of known size takes"),
        ({"capture": "autograd"}, "capture='autograd' runs the model once for each size"),
    ],
)
def test_symbols_are_refused_with_what_takes_numbers_alone(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"MC1003: dynamic=True cannot make symbols of sizes here\n  why:  .*{why}"):
        step_of(Classifier, dynamic=True, **options)


@pytest.mark.fast
def test_numbers_of_factors_that_workers_send_are_symbols() -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of_world(model, world=mirrorc.World(2), optimizer=optimizer, dynamic=True, exchange="factors")
    with step:
        program = step.prepare(*text(5, 6))
    assert any(bucket.is_sent_as_factors for bucket in program.buckets) and ": size[s0]" in str(program)


def test_numbers_that_stay_are_remarked_on() -> None:
    step, _ = step_of(Classifier, microbatches=2)
    step(*text(5, 6))
    step(*text(5, 8))
    remarks = [str(remark) for remark in step.program.remarks]
    why = "microbatches of a shard have different numbers of examples, and each number has a graph"
    assert f"capture: sizes of arguments are numbers: {why}" in remarks
    assert f"sizes of arguments are numbers: {why}" in step.explain().capture


@pytest.mark.parametrize(("make_model", "num_devices"), [(Classifier, 2), (Wide, 1), (Tagger, 2), (Recurrent, 1)])
def test_lengths_of_microbatches_are_symbols(
    make_model: Callable[[], nn.Module], num_devices: int, quiet: None
) -> None:
    sizes = [(8, 5), (8, 9), (8, 4), (4, 7), (4, 6), (4, 3), (6, 5), (8, 12)]
    step, program = trained_beside_plain_pytorch(make_model, sizes, num_devices, microbatches=2)
    assert (
        num_programs(step) == 4
    )  # one of numbers; one for each number of texts; on two devices, the parts of three texts differ
    assert f"x: i64[{8 // num_devices}, s0]" in program.to_text()


CUT_BY_EXAMPLES = "microbatches are cut by numbers of examples"


@pytest.mark.parametrize("num_devices", [2, 1])
def test_numbers_of_examples_beside_microbatches_are_remarked_on(num_devices: int, quiet: None) -> None:
    sizes = [(8, 5), (8, 9), (12, 4), (12, 7), (16, 6)]
    step, program = trained_beside_plain_pytorch(Classifier, sizes, num_devices, microbatches=2, dynamic=True)
    assert num_programs(step) == 3  # one for each number of examples
    assert f"x: i64[{16 // num_devices}, s0]" in program.to_text()
    remark = f"numbers of examples are numbers: {CUT_BY_EXAMPLES}"
    assert told(program, remark)
    assert remark in program.to_text() and remark in step.explain().capture
    assert not told(program, "sizes of arguments are numbers")


def test_microbatches_of_which_only_numbers_of_examples_change_leave_numbers_and_a_remark(quiet: None) -> None:
    sizes = [(8, 5), (12, 5), (16, 5), (20, 5)]
    step, program = trained_beside_plain_pytorch(Classifier, sizes, 2, microbatches=2)
    assert num_programs(step) == 4
    assert "x: i64[10, 5]" in program.to_text() and "s0" not in program.to_text()
    remark = f"sizes of arguments are numbers: {CUT_BY_EXAMPLES}"
    for (batch, length), is_told in zip(sizes, [False, True, True, True], strict=True):
        own = step.prepare(*text(batch, length))
        assert told(own, remark) == is_told
        assert not told(own, "numbers of examples are numbers")
    assert num_programs(step) == 4
    assert remark in program.to_text() and remark in step.explain().capture


def test_lengths_of_microbatches_alone_leave_no_remark(quiet: None) -> None:
    step, program = trained_beside_plain_pytorch(Classifier, [(8, 5), (8, 9), (8, 4)], 2, microbatches=2)
    assert num_programs(step) == 2
    assert "x: i64[4, s0]" in program.to_text()
    assert not told(program, CUT_BY_EXAMPLES)


def test_evaluations_beside_microbatches_have_symbols_for_numbers_of_examples() -> None:
    step, model = step_of(Classifier, microbatches=2, dynamic=True)
    for batch, length in [(8, 5), (12, 7), (16, 5), (7, 4)]:
        x, y = text(batch, length)
        with torch.no_grad():
            expected = model(x, y)
        torch.testing.assert_close(step.evaluate(x, y), expected)
    assert num_programs(step) == 1


def test_another_dtype_is_another_program() -> None:
    step, _ = step_of(Classifier)
    for length in (5, 6, 7):
        step(*text(4, length))
    assert num_programs(step) == 2
    x, y = text(4, 8)
    step(x.to(torch.int32), y)
    assert num_programs(step) == 3


def test_the_printed_form_has_symbols_and_is_read_back() -> None:
    _, program = trained_beside_plain_pytorch(Tagger, [(4, 5), (6, 9)], 2, dynamic=True)
    (signature,) = re.findall(r"(?m)^def cpu_0\((.*)\):", program.to_text(regions=True))
    assert "x: i64[s0, s1]" in signature and "s1: size[s1]" in signature and "size[s0*s1]" in signature


def test_a_program_with_symbols_is_saved_and_loaded(tmp_path: Path) -> None:
    _, program = trained_beside_plain_pytorch(CausalAttention, [(4, 5), (6, 9)], 2, dynamic=True)
    program.save(tmp_path / "program.mirror")
    loaded = Program.load(tmp_path / "program.mirror")
    verify(loaded)
    assert "s0*s1" in loaded.to_text()
    assert loaded.to_text(regions=True) == program.to_text(regions=True)
    loaded.save(tmp_path / "again.mirror")
    assert (tmp_path / "again.mirror").read_bytes() == (tmp_path / "program.mirror").read_bytes()


def test_gradients_stay_factors_for_sizes_with_which_they_would(quiet: None) -> None:
    """A product's factors of 130 words on each device are four times as large as `Wide.up`'s gradient."""
    step, program = trained_beside_plain_pytorch(Wide, [(4, 5), (4, 8), (4, 100)], 2)
    assert num_programs(step) == 2
    assert not told(program, "no larger than their factors")
    step(*text(4, 130))
    assert num_programs(step) == 3
    assert told(step.prepare(*text(4, 130)), "1 no larger than their factors")
    step(*text(4, 90))
    assert num_programs(step) == 3


def told(program: Program, remark: str) -> bool:
    return any(remark in str(one) for one in program.remarks)


def test_memory_is_told_for_the_sizes_of_the_compilation() -> None:
    step, _ = trained_beside_plain_pytorch(Classifier, [(4, 5), (4, 8), (4, 30)], 2)
    assert "i64[2, 8]" in str(step.memory()) or "[2, 8, " in str(step.memory())


def test_so_it_is_of_factors_that_updates_multiply() -> None:
    told = []
    for dynamic in (None, False):
        step, _ = trained_beside_plain_pytorch(Wide, [(8, 5), (8, 8)], 2, dynamic=dynamic, microbatches=2)
        told.append(str(step.memory()))
    assert "temporaries of update" in told[0] and told[0] == told[1]


def test_no_guard_is_made_while_steps_run() -> None:
    """What looks at a symbol in a step would take the size of the compilation for that of the step."""
    step, _ = trained_beside_plain_pytorch(Wide, [(4, 5), (4, 8)], 2)
    found = next(own[-1] for own in step._specializer._caches[Purpose.STEP]._by_key.values() if own[-1].sizes)
    environments = [sizes._fake_mode.shape_env for sizes, _ in found.sizes.graphs if sizes is not None]
    before = [len(one.guards) for one in environments]
    for _, length in random_sizes(4, 5):
        step(*text(4, length))
    assert [len(one.guards) for one in environments] == before


class Random(Parts):
    def __init__(self) -> None:
        super().__init__(tokens=nn.Embedding(WORDS, 8), head=nn.Linear(8, 5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(self.tokens(x), 0.3) + torch.rand(x.shape).unsqueeze(-1)
        hidden = hidden * (torch.rand(x.size(0), 1, 1) > 0.2) + 0.1 * torch.randn_like(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten() % 5)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.filterwarnings("error:Raw SymInt")
def test_random_numbers_are_those_of_programs_for_each_size(num_devices: int) -> None:
    losses = []
    for dynamic in (None, False):
        torch.manual_seed(0)
        model = Random()
        devices = [f"cpu:{i}" for i in range(num_devices)]
        step = compiled_step(model, devices=devices, dynamic=dynamic)
        losses.append([float(step(*text(*size)).detach()) for size in [(8, 5), (8, 7), (12, 9), (6, 11)]])
        assert num_programs(step) == (4 if dynamic is False else 3)
    assert losses[0] == losses[1]


def test_an_error_of_the_model_is_the_models() -> None:
    step, _ = step_of(Tagger, dynamic=True)
    step(*text(4, 6))
    with pytest.raises(MirrorcError, match="index out of range"):
        step(*text(4, 70))


@pytest.mark.fast
@pytest.mark.parametrize("make_model", [*slow((Classifier,), (Wide,)), *exhaustive((Tagger,), (Convolutions,))])
def test_compiled_regions_take_all_sizes(make_model: Callable[[], nn.Module], quiet: None) -> None:
    trained_beside_plain_pytorch(make_model, random_sizes(10, 4), 2, backend="inductor")


@pytest.mark.fast
def test_a_program_of_fewer_symbols_serves_no_more(quiet: None) -> None:
    """A run that is resumed knows the last symbols only, and its steps are to have the same bits."""
    served: list[Any] = []
    with compiled_step(nn.Linear(3, 2), F.mse_loss) as step:
        find = step._specializer.specialization_for
        step._specializer.specialization_for = lambda *a, **k: served.append(find(*a, **k)[0]) or (served[-1], a[1])
        for examples, length in ((8, 5), (8, 7), (8, 9), (6, 7), (8, 9), (8, 5), (8, 11)):
            step(torch.randn(examples, length, 3), target=torch.randn(examples, length, 2))
    first, by_length, of_length, by_both, again, of_first, other = served
    assert [one.symbolic[0] for one in (first, by_length, by_both) if one.symbolic] == [{1}, {0, 1}]
    assert of_length is by_length and of_first is first
    assert again is by_both and other is by_both


@pytest.mark.fast
def test_what_changed_is_no_size_that_is_a_symbol(quiet: None, caplog: pytest.LogCaptureFixture) -> None:
    with compiled_step(nn.Linear(3, 2), F.mse_loss) as step:
        for examples in (8, 6, 4):
            step(torch.randn(examples, 3), target=torch.randn(examples, 2))
        with caplog.at_level("INFO", logger="mirrorc"), torch.autocast("cpu", torch.bfloat16):
            step(torch.randn(4, 3), target=torch.randn(4, 2))
    (line,) = (text for text in caplog.messages if text.startswith("compiling"))
    assert "(torch's modes have changed)" in line
