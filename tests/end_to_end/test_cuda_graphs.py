"""Steps that are captured and replayed mean what they mean without; CUDA is stood in for by recorded operators on the CPU."""

import copy
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asserting import Asserting
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from recorded_calls import CallRecorder
from selections import exhaustive, slow
from small_modules import module_of
from torch import nn
from torch.nn import functional as F
from twins import compiled_step

import mirrorc
from mirrorc import ExecutionError
from mirrorc.compilation import step_compiler
from mirrorc.ir.devices import Device
from mirrorc.options.option import Request
from mirrorc.options.table import OPTIONS
from mirrorc.runtime.execution.cuda_graphs import NUM_WARM_UP_STEPS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA stands in for itself, see test_cuda.py")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": partial(torch.optim.Adam, amsgrad=True),
    "sgd": partial(torch.optim.SGD, momentum=0.5),
    "adagrad": torch.optim.Adagrad,
}
RATE = 0.125  # has 32 bits, as captured learning rates have: so the bits of parameters are the same
Change = Callable[[nn.Module, torch.optim.Optimizer, int], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def make_net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(seed: int, num_examples: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_examples, 6, generator=generator)
    return {"x": x, "target": torch.randint(0, 3, (num_examples,), generator=generator)}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CallRecorder:
    found = CallRecorder()
    stand_in(monkeypatch, found)
    return found


def stand_in(patch: pytest.MonkeyPatch, recorder: CallRecorder) -> None:
    """CUDA, as far as captures go: torch's Adam asks it whether it is capturing."""
    patch.setattr(OPTIONS, "check_exclusions", lambda request: None)
    patch.setattr(step_compiler, "CudaCapturer", lambda device, seconds: recorder)
    stream = SimpleNamespace(is_capturing=lambda: recorder.is_capturing)
    patch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    patch.setattr(torch.accelerator, "current_stream", lambda *_: stream)


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> mirrorc.Step:
    options = {"cuda_graphs": True, "loss_fn": F.cross_entropy, "buckets": 0.0001, **options}
    return compiled_step(model, devices=1, optimizer=optimizer, **options)


def train(
    make_optimizer: Callable[..., torch.optim.Optimizer],
    num_steps: int,
    *,
    cuda_graphs: bool,
    sizes: tuple[int, ...] = (5,),
    change: Change = lambda *_: None,
) -> list[Any]:
    model = make_net()
    optimizer = make_optimizer(model.parameters(), lr=RATE)
    losses = []
    with compiled(model, optimizer, cuda_graphs=cuda_graphs) as step:
        for i in range(num_steps):
            change(model, optimizer, i)
            losses.append(step(**batch(i, sizes[i % len(sizes)])))
    assert change is gives_the_rate_as_a_tensor or isinstance(optimizer.param_groups[0]["lr"], float), "as it was"
    state = [value for entries in optimizer.state_dict()["state"].values() for value in entries.values()]
    return [*losses, *copy.deepcopy(list(model.state_dict().values())), *copy.deepcopy(state)]


def assert_same_bits(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


# The same numbers


@pytest.mark.parametrize(
    "kind", [OPTIMIZERS["adamw"], *slow(*((OPTIMIZERS[kind],) for kind in OPTIMIZERS if kind != "adamw"))]
)
def test_replayed_steps_give_the_same_bits(recorder: CallRecorder, kind: Callable[..., torch.optim.Optimizer]) -> None:
    expected = train(kind, 9, cuda_graphs=False)
    assert_same_bits(train(kind, 9, cuda_graphs=True), expected)
    assert len(recorder.graphs) == 1
    assert recorder.num_replays == 9 - NUM_WARM_UP_STEPS


def halves_the_rate(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    optimizer.param_groups[0]["lr"] = RATE / 2 ** (i % 4)


def gives_the_rate_as_a_tensor(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(RATE / 2 ** (i % 4))


def loads_the_model(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    if i == 6:
        torch.manual_seed(2)
        model.load_state_dict(Net().state_dict())


def loads_the_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    if i == 6:
        saved = copy.deepcopy(optimizer.state_dict())
        for entries in saved["state"].values():
            for key in entries:
                entries[key] = entries[key] + 1
        optimizer.load_state_dict(saved)


def empties_the_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    if i == 6:
        optimizer.state.clear()


def decays_from_step_6(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.01 if i >= 6 else 0.0


CHANGES: list[tuple[Change, int]] = [
    (loads_the_optimizer, 2),
    (halves_the_rate, 1),
    (gives_the_rate_as_a_tensor, 1),
    (loads_the_model, 1),
    (empties_the_optimizer, 2),
    (decays_from_step_6, 2),
]


@pytest.mark.parametrize(
    ("kind", "change", "num_graphs"),
    [
        *((OPTIMIZERS["adamw"], *case) for case in CHANGES),
        (OPTIMIZERS["sgd"], *CHANGES[0]),
        *exhaustive(*((OPTIMIZERS["sgd"], *case) for case in CHANGES[1:])),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_changes_between_steps_is_taken_over(
    recorder: CallRecorder, kind: Callable[..., torch.optim.Optimizer], change: Change, num_graphs: int
) -> None:
    expected = train(kind, 12, cuda_graphs=False, change=change)
    assert_same_bits(train(kind, 12, cuda_graphs=True, change=change), expected)
    assert len(recorder.graphs) == num_graphs, "captured anew only where a graph holds what changed"
    assert [graph.is_reset for graph in recorder.graphs] == [True] * num_graphs, "the last by close()"
    assert recorder.num_waits == num_graphs, "nothing is freed while it may be running"


def test_two_shapes_in_turn_have_a_graph_each(recorder: CallRecorder) -> None:
    kind = OPTIMIZERS["adamw"]
    expected = train(kind, 14, cuda_graphs=False, sizes=(5, 7))
    assert_same_bits(train(kind, 14, cuda_graphs=True, sizes=(5, 7)), expected)
    assert [graph.num_replays for graph in recorder.graphs] == [7 - NUM_WARM_UP_STEPS] * 2


@fuzzed(3)
@given(
    actions=st.lists(
        st.sampled_from([halves_the_rate, loads_the_model, loads_the_optimizer, decays_from_step_6]), max_size=3
    ),
    sizes=st.lists(st.integers(2, 6), min_size=1, max_size=2),
    kind=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_any_changes_together(actions: list[Change], sizes: list[int], kind: str) -> None:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
        for action in actions:
            action(model, optimizer, i)

    with pytest.MonkeyPatch.context() as patch:
        recorder = CallRecorder()
        stand_in(patch, recorder)
        make, shapes = OPTIMIZERS[kind], tuple(sizes)
        expected = train(make, 18, cuda_graphs=False, sizes=shapes, change=change)
        assert_same_bits(train(make, 18, cuda_graphs=True, sizes=shapes, change=change), expected)
        assert recorder.num_replays > 0


# Memory


def test_a_graph_reads_its_batch_from_memory_of_its_own(recorder: CallRecorder) -> None:
    model = make_net()
    with compiled(model, torch.optim.AdamW(model.parameters(), lr=RATE)) as step:
        addresses = []
        for i in range(6):
            own = batch(i)
            step(**own)
            assert step._runs.last is not None and step._runs.last._step_graph is not None
            inputs = step._runs.last._step_graph._inputs
            addresses.append([value.data_ptr() for value in inputs])
            assert torch.equal(inputs[0], own["x"]) and inputs[0].data_ptr() != own["x"].data_ptr()
    assert addresses == [addresses[0]] * 6


def test_a_loss_that_is_kept_stays_as_it_is(recorder: CallRecorder) -> None:
    model = make_net()
    with compiled(model, torch.optim.AdamW(model.parameters(), lr=RATE)) as step:
        losses, values = [], []
        for i in range(7):
            losses.append(step(**batch(i)))
            values.append(losses[-1].item())
    assert [loss.item() for loss in losses] == values and len(set(values)) == 7


def test_expanded_and_transposed_inputs(recorder: CallRecorder) -> None:
    runs = []
    for cuda_graphs in (False, True):
        torch.manual_seed(0)
        model = module_of(lambda self, x, scale: self.inner(x * scale), inner=nn.Linear(6, 3))
        with compiled(model, torch.optim.SGD(model.parameters(), lr=RATE), cuda_graphs=cuda_graphs) as step:
            for i in range(6):
                own = batch(i)
                x = own["x"]
                step(x.t().contiguous().t(), x[:, :1].expand(5, 6), target=own["target"])
        runs.append(list(model.parameters()))
    assert_same_bits(*runs)


def test_the_rate_has_32_bits(recorder: CallRecorder) -> None:
    """As torch's fused CUDA kernels demand of a rate that is a tensor; from the first step, not from the first replay on."""
    model, twin = make_net(), make_net()
    rounded = torch.tensor(0.1, dtype=torch.float32).item()
    assert rounded != 0.1
    with (
        compiled(model, torch.optim.SGD(model.parameters(), lr=0.1)) as step,
        compiled(twin, torch.optim.SGD(twin.parameters(), lr=rounded), cuda_graphs=False) as plain,
    ):
        for i in range(5):
            step(**batch(i))
            plain(**batch(i))
            assert_same_bits(list(model.parameters()), list(twin.parameters()))


# Failures


def refuses(error: type[Exception], *words: str) -> Any:
    return pytest.raises(error, match="(?s)" + ".*".join(re.escape(word) for word in words))


def test_a_capture_that_fails_leaves_everything_as_it_was(recorder: CallRecorder) -> None:
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    with compiled(model, optimizer) as step:
        for i in range(NUM_WARM_UP_STEPS):
            step(**batch(i))
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        recorder.error = RuntimeError("out of graphs")
        with refuses(
            ExecutionError, "cannot be captured", "out of graphs", "now:  No parameter was changed", "cuda_graphs=False"
        ):
            step(**batch(0))
        torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0.0, atol=0.0)
        recorder.error = None
        for _ in range(2):
            step(**batch(0))
        assert recorder.num_replays == 2, (
            "it goes on, and captures anew: memory is where it was, so nothing must be warmed up"
        )


def test_an_operation_that_cannot_be_captured_is_named(recorder: CallRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_net()
    with compiled(model, torch.optim.SGD(model.parameters(), lr=RATE)) as step:
        for _ in range(NUM_WARM_UP_STEPS):
            step(**batch(0))
        monkeypatch.setattr(
            sys.modules["torch.optim.sgd"], "sgd", lambda parameters, *_, **__: parameters[0].sum().item()
        )
        with refuses(ExecutionError, "in update", "not permitted when stream is capturing", "No parameter was changed"):
            step(**batch(0))


def test_adam_neither_refuses_to_be_captured_nor_warns(recorder: CallRecorder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(torch.optim.Adam, 6, cuda_graphs=True)
    assert recorder.num_replays == 6 - NUM_WARM_UP_STEPS


def test_hyperparameters_that_keep_changing_are_warned_of(recorder: CallRecorder) -> None:
    def cycles(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> None:
        optimizer.param_groups[0]["betas"] = (0.9 - i / 100, 0.99)

    with pytest.warns(
        UserWarning, match=r"(?s)dropped 8 times, now because of hyperparameters.*cuda_graphs=False"
    ) as caught:
        train(torch.optim.AdamW, 12, cuda_graphs=True, change=cycles)
    assert [w.filename for w in caught if "cuda_graphs" in str(w.message)] == [__file__], "once, at the user's line"
    assert recorder.graphs == []


def with_hook(parameters: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=lr)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            torch.optim.RMSprop,
            ("'first.weight' (torch.float32) by RMSprop", "group 0 is not fused", "AdamW", "cuda_graphs=False"),
        ),
        (partial(torch.optim.AdamW, foreach=True), ("by AdamW", "group 0 is not fused")),
        (partial(torch.optim.SGD, fused=False), ("by SGD", "group 0 is not fused")),
        (partial(torch.optim.AdamW, capturable=True), ("AdamW, which runs by itself", "capturable")),
        (with_hook, ("SGD, which runs by itself", "hooks")),
        (partial(torch.optim.SGD, weight_decay=torch.tensor(0.5)), ("a tensor in 'weight_decay'", "float(")),
    ],
    ids=["rmsprop", "foreach", "not-fused", "capturable", "hook", "tensor"],
)
def test_optimizers_that_cannot_be_captured(
    recorder: CallRecorder, make: Callable[..., torch.optim.Optimizer], words: tuple[str, ...]
) -> None:
    model = make_net()
    before = copy.deepcopy(model.state_dict())
    with compiled(model, make(model.parameters(), lr=RATE)) as step, refuses(ValueError, "cuda_graphs=True", *words):
        step(**batch(0))
    assert_same_bits(list(model.state_dict().values()), list(before.values()))


def test_an_optimizer_that_ceases_to_be_fused(recorder: CallRecorder) -> None:
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with compiled(model, optimizer) as step:
        for _ in range(5):
            step(**batch(0))
        optimizer.param_groups[0]["fused"] = False
        for _ in range(2):
            with refuses(ValueError, "by SGD", "group 0 is not fused"):
                step(**batch(0))
        optimizer.param_groups[0]["fused"] = None
        step(**batch(0))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("model", "words"),
    [
        *slow((Asserting(), ("assert on a tensor", "asserting.py", "finite"))),
        (nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), ("random numbers", "Dropout")),
    ],
    ids=["asserts", "dropout"],
)
def test_what_cannot_be_replayed_is_refused(recorder: CallRecorder, model: nn.Module, words: tuple[str, ...]) -> None:
    step = compiled(model, torch.optim.AdamW(model.parameters(), lr=RATE), loss_fn=F.mse_loss)
    with step, refuses(ValueError, *words, "cuda_graphs=False"):
        step(torch.ones(4, 4), target=torch.ones(4, 3))


def test_nothing_is_recorded_and_explain_says_why(recorder: CallRecorder) -> None:
    model = make_net()
    with compiled(model, torch.optim.AdamW(model.parameters(), lr=RATE)) as step:
        step(**batch(0))
        with refuses(ExecutionError, "one launch", "cuda_graphs=False"):
            step.explain()


@pytest.mark.fast
def test_only_one_gpu() -> None:
    gpus = (Device("cuda:0", torch.device("cuda", 0)), Device("cuda:0/1", torch.device("cuda", 0)))
    request = Request({**OPTIONS.defaults, "optimizer": (), "cuda_graphs": True}, devices=gpus)
    OPTIONS.check_exclusions(replace(request, devices=gpus[:1]))
    OPTIONS.check_exclusions(Request(OPTIONS.defaults, devices=gpus))
    with refuses(
        ValueError, "on cuda:0, cuda:0/1", "devices wait for one another in Python", "devices=['cuda:0'], one GPU"
    ):
        OPTIONS.check_exclusions(request)
    model = make_net()
    with refuses(ValueError, "on cpu:0", "a graph is of a GPU"):
        compiled(model, torch.optim.AdamW(model.parameters()))
