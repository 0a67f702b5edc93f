"""Steps that are traced by running Python once, with capture="trace": the same numbers as plain PyTorch, or a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from branching import batches
from references import (
    assert_same_training,
    train_mirrored,
    train_on_one_device,
    train_shard_by_shard,
    unchanged,
)
from selections import slow
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mirrorc
from mirrorc.capture.front_ends import front_end as front_ends
from mirrorc.capture.front_ends.front_end import front_end_named
from mirrorc.capture.python_trace.retrace_guards import TraceGuards

TOLERANCE = 1e-12
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    """Two layers around what a function does between them."""

    def __init__(self, deed: Callable[[Any, torch.Tensor], Any] = lambda model, h: h.tanh()) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()
        self.deed = deed
        self.kept: list[Any] = []
        self.table = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)
        self.switch = torch.tensor(True)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(8, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        found = self.deed(self, h)
        return self.last(found if isinstance(found, torch.Tensor) else h)


def compiled(model: nn.Module, devices: int = 2, **options: Any) -> mirrorc.Step:
    given = {"loss_fn": F.cross_entropy, "backend": "eager", "capture": "trace", **options}
    return mirrorc.compile(model, devices, optimizer=SGD(model.parameters()), **given)


# What is traced


class Doubled(torch.autograd.Function):
    """A function with a backward that is not its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.scale = 3.0 if x.numel() else 1.0
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.scale


class Penalized(Net):
    """Adds the gradient by its argument, which takes a second backward, and which Dynamo does not read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = super().forward(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + gradient.norm(dim=1, keepdim=True)


class Tied(Net):
    """Uses a weight by two names, a module twice, and modules in a list and behind a method."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(6, 8).double()
        self.again.weight = self.first.weight
        self.layers, self.read = [self.first, self.again, self.first], self.last.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(sum(layer(x) for layer in self.layers).tanh())  # type: ignore[attr-defined]


class Hooked(Net):
    """Has hooks on forward and backward of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_full_backward_hook(
            lambda module, given, got: (2 * given[0],) if given[0] is not None else None
        )
        self.last.register_full_backward_hook(lambda module, given, got: (2 * given[0],))
        self.last.register_forward_hook(lambda module, given, result: result * module.in_features)


class WritesInPlace(Net):
    """Writes buffers and views of its own values in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        with torch.no_grad():
            self.seen.add_(1.0)
        h[:, :2].mul_(self.seen)
        return self.last(h.tanh_())


class WithUnused(Net):
    """Has a layer that forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2).double()


@torch.no_grad()
def without_gradient(h: torch.Tensor) -> torch.Tensor:
    return h.sigmoid()


FACTORS = {"scale": 1.5}


def reads_what_is_around(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * FACTORS["scale"] * model.table + torch.tensor([0.5] * 8, dtype=torch.float64)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "own function": lambda: Net(lambda model, h: Doubled.apply(h).tanh()),
    "penalty": Penalized,
    "tied": Tied,
    "hooks": Hooked,
    "around": lambda: Net(reads_what_is_around),
    "hook on a value": lambda: Net(lambda model, h: (h.register_hook(lambda own: 2 * own), h.tanh())[1]),
    "in place": lambda: Net(lambda model, h: h.clone().mul_(2.0).add_(h.detach())[:, :].tanh_()),
    "no gradient": lambda: Net(lambda model, h: h * without_gradient(h) * model.frozen),
    "unused": lambda: WithUnused(),
}


FAST = (("penalty", 2, "eager"), ("around", 3, "eager"), ("hooks", 2, "eager"))


@pytest.mark.parametrize(("kind", "num_devices", "backend"), [
    *FAST, *slow(*((kind, 2, "eager") for kind in KINDS if (kind, 2, "eager") not in FAST),
                 ("penalty", 1, "eager"), ("penalty", 3, "eager"), ("penalty", 2, "inductor"), ("in place", 2, "inductor"))
])  # fmt: skip
def test_steps_equal_those_of_one_device(kind: str, num_devices: int, backend: str) -> None:
    model, data = KINDS[kind](), batches(7, 7)
    found = train_mirrored(model, SGD, data, num_devices, F.cross_entropy, backend=backend, capture="trace")
    assert_same_training(found, train_on_one_device(model, SGD, data, F.cross_entropy), TOLERANCE)


def test_buffers_are_those_of_each_shard() -> None:
    class Normalizes(WritesInPlace):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(super().forward(x))

    data = batches(7, 7)
    found = train_mirrored(Normalizes(), SGD, data, 2, F.cross_entropy, capture="trace")
    assert_same_training(found, train_shard_by_shard(Normalizes(), SGD, data, 2, F.cross_entropy), 1e-10)


class Drops(Net):
    """Draws random numbers, also within a checkpoint."""

    def __init__(self, reenters: bool | None = None) -> None:
        super().__init__()
        self.reenters = reenters

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.first(x).tanh(), 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reenters is None:
            return self.last(F.dropout(self.encode(x) + torch.rand_like(x[:, :1])))
        return self.last(F.dropout(checkpoint(self.encode, x, use_reentrant=self.reenters)))


@pytest.mark.parametrize("reenters", [None, True, *slow((False,))])
def test_random_numbers_and_checkpoints_are_those_of_graphs_by_dynamo(reenters: bool | None) -> None:
    data, found = batches(7, 7), []
    for front_end in ("dynamo", "trace"):
        torch.manual_seed(3)
        model = Drops(reenters)
        with compiled(model, capture=front_end) as step:
            losses = [step(**batch).item() for batch in data]
            text = step.program.to_text(regions=True, sources=False)
        values = [value.tolist() for value in model.state_dict().values()]
        found.append((losses, values, [text.count(word) for word in ("tanh", "seeded_mask", "mm(")]))
    assert found[0] == found[1]


# What is noticed


TEMPERATURE = 1.0


def anneals(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * TEMPERATURE


@pytest.fixture
def in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are a rung of the ladder."""
    monkeypatch.setattr(front_ends, "_rungs", [front_end_named(name) for name in ("dynamo", "trace", "autograd")])


@pytest.fixture
def temperature(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    yield lambda value: monkeypatch.setitem(globals(), "TEMPERATURE", value)


def trained(
    model: nn.Module, twin: nn.Module, step: mirrorc.Step, optimizer: torch.optim.Optimizer, batch: Any
) -> None:
    """One step of both, whose losses agree."""
    found = step(**batch)
    optimizer.zero_grad()
    expected = F.cross_entropy(twin(batch["x"]), batch["target"])
    expected.backward()
    optimizer.step()
    assert found.item() == pytest.approx(expected.item(), rel=TOLERANCE)


def test_a_number_that_changes_is_traced_anew(temperature: Callable[[float], None]) -> None:
    model, twin, data = Net(anneals), Net(anneals), batches(6, 6, 6, 6)
    optimizer = SGD(twin.parameters())
    with compiled(model) as step:
        for batch, value in zip(data, (1.0, 0.5, 0.25, 0.5), strict=True):
            temperature(value)
            trained(model, twin, step, optimizer, batch)
        assert step._specializer.num_programs == 3


class Configuration:
    """Finds its attributes by other names than those that are asked for, as those of Hugging Face do."""

    names: ClassVar[dict[str, str]] = {"width": "size"}

    def __init__(self, size: float, inner: Any = None) -> None:
        self.size, self.inner = size, inner

    def __getattribute__(self, name: str) -> Any:
        if super().__getattribute__("__dict__").get("hidden") is not None:
            return 3.0
        return super().__getattribute__(super().__getattribute__("names").get(name, name))


def reads_a_configuration(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * model.configuration.inner.width


def test_configurations_that_do_not_name_what_they_read_are_watched() -> None:
    models = Net(reads_a_configuration), Net(reads_a_configuration)
    (model, twin), (batch,) = models, batches(6)
    for own in models:
        own.configuration = Configuration(1.0, Configuration(1.0))
    optimizer = SGD(twin.parameters())

    def change(number: int, configuration: Any) -> None:
        if number == 1:
            configuration.inner.size = 0.5
        elif number == 2:
            configuration.inner.hidden = True
        elif number == 3:
            del configuration.inner.hidden
        elif number == 4:
            configuration.inner = Configuration(2.0)

    with compiled(model, 1) as step:
        for number in range(5):
            for own in models:
                change(number, own.configuration)
            trained(model, twin, step, optimizer, batch)
        assert step._specializer.num_programs == 4


@pytest.mark.usefixtures("in_between")
def test_a_number_that_keeps_changing_is_left_to_plain_pytorch(temperature: Callable[[float], None]) -> None:
    class Anneals(Hooked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * TEMPERATURE

    model, twin, (batch,) = Anneals(), Anneals(), batches(6)
    optimizer = SGD(twin.parameters())
    with (
        compiled(model, capture="auto") as step,
        pytest.warns(UserWarning, match="trains with capture='trace'") as told,
    ):
        for number in range(1, 7):
            temperature(1.0 / number)
            trained(model, twin, step, optimizer, batch)
        assert "captured with capture='autograd'" in step.program.to_text()
        assert "'trace' cannot capture Anneals: what it reads keeps changing ('TEMPERATURE')" in step.program.to_text()
    assert len([one for one in told if "capture=" in str(one.message)]) <= 2


def threads(model: Any, h: torch.Tensor) -> torch.Tensor:
    return h * torch.get_num_interop_threads()  # which nothing watches


@pytest.mark.parametrize("call", [3, *slow((2,), (12,))])
def test_what_nothing_watches_is_noticed_where_a_call_is_compared(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    difference = TraceGuards._difference
    monkeypatch.setattr(TraceGuards, "_difference", lambda own: (compared.append(own), difference(own))[1])
    model, (batch,) = Net(threads), batches(6)
    with compiled(model, 1) as step:
        for _ in range(call - 1):
            step(**batch)
        assert len(compared) == {2: 0, 3: 1, 12: 2}[call]
        monkeypatch.setattr(torch, "get_num_interop_threads", lambda: 100)
        with (
            unchanged(model),
            pytest.raises(mirrorc.CaptureError, match=r"Net: another call is traced to .*100.* in place of"),
        ):
            step(**batch)


@pytest.mark.usefixtures("in_between")
def test_a_difference_is_left_to_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(Hooked):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.get_num_interop_threads()

    model, twin, (batch,) = Reads(), Reads(), batches(6)
    optimizer = SGD(twin.parameters())
    with compiled(model, capture="auto") as step, pytest.warns(UserWarning, match="trains with capture='trace'"):
        for number in (1, 2, 3):
            monkeypatch.setattr(torch, "get_num_interop_threads", lambda number=number: number)
            trained(model, twin, step, optimizer, batch)
        assert "captured with capture='autograd'" in step.program.to_text()


# Other calls than plain steps


def test_evaluations_outputs_microbatches_and_accumulation_are_those_of_one_device() -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(output, target), output.argmax(1)

    model, twin, data = Penalized(), Penalized(), batches(7, 6)
    optimizer = SGD(twin.parameters())
    with compiled(model, loss_fn=loss_fn, return_outputs=True, microbatches=2) as step:
        step.accumulate(**data[0])
        loss, (output, chosen) = step(**data[1])
        parts = [F.cross_entropy(twin(batch["x"]), batch["target"], reduction="sum") / 13 for batch in data]
        expected = twin(data[1]["x"])
        sum(parts).backward()  # type: ignore[union-attr]
        optimizer.step()
        torch.testing.assert_close(output, expected.detach(), rtol=1e-10, atol=1e-12)
        assert torch.equal(chosen, expected.argmax(1)) and loss.item() == pytest.approx(parts[1].item() * 13 / 6)
        for own, its in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own, its, rtol=1e-10, atol=1e-12)
    model, twin = Net(), Net()
    with compiled(model) as step:
        model.eval()
        found = step.evaluate(**data[0])
        assert found.item() == pytest.approx(F.cross_entropy(twin(data[0]["x"]), data[0]["target"]).item(), rel=1e-12)


def test_a_model_that_gives_its_loss_trains_on_ragged_batches() -> None:
    class Gives(Hooked):
        def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            output = super().forward(x)
            return {"loss": F.cross_entropy(output, target), "logits": output}

    data = batches(7, 2, 5, 1)
    found = train_mirrored(Gives(), SGD, data, 2, capture="trace")
    assert_same_training(found, train_on_one_device(Gives(), SGD, data), TOLERANCE)


def test_what_is_printed_is_printed_once_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        compiled(Net(lambda model, h: print("here"))) as step,  # noqa: T201
        pytest.warns(UserWarning, match="print in Net ran while") as told,
    ):
        for batch in batches(6, 6, 6, 6):
            step(**batch)
    assert len([one for one in told if "print in Net" in str(one.message)]) == 1 and "here" in capsys.readouterr().out


def test_what_is_handed_on_in_attributes_is_said() -> None:
    class Hands(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.between = self.first(x)
            return self.last(self.between)

    model, data = Hands(), batches(6, 6)
    with pytest.warns(UserWarning, match="assigns attributes of modules \\('between'\\) before it reads them"):
        found = train_mirrored(model, SGD, data, 2, F.cross_entropy, capture="trace")
    assert_same_training(found, train_on_one_device(Hands(), SGD, data, F.cross_entropy), TOLERANCE)


def test_a_remark_says_what_is_watched_and_the_step_is_refused_in_one_sentence() -> None:
    (batch,) = batches(6)
    with compiled(Net()) as step:
        step(**batch)
        assert "the calls 2, 3, 12, 48, ... of a kind are traced again and compared" in step.program.to_text()
    model = Net(lambda model, h: h if h.sum() > 0 else 2 * h)
    words = r"cannot trace Net at .*test_traces_of_python.py:\d+ in <lambda>: .*goes by values of data.*Remedy: "
    with compiled(model) as step, unchanged(model), pytest.raises(mirrorc.CaptureError, match=words):
        step(**batch)
