"""Models that TorchScript runs, whole or in part: they train with capture="autograd", to which "auto" comes by itself."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from branching import SGD, TOLERANCE, batches
from references import Trained, assert_same_bits, assert_same_training, refused, train_step
from torch import nn
from torch.nn import functional as F
from twins import compiled_step

import mirrorc
from mirrorc import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:MC2701:UserWarning")
AUTOGRAD = {"capture": "autograd"}


class Looping(nn.Module):
    def __init__(self, rate: float = 0.0, *, normalizes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8) if normalizes else nn.Identity()
        self.dropout = nn.Dropout(rate)
        self.double()

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        for _ in range(times):
            h = torch.tanh(self.middle(h))
        return self.last(self.dropout(self.norm(h)))


class Around(nn.Module):
    """A module of Python with one of TorchScript in it, which it reaches by another attribute, too, and whose weight it ties."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, [inner]
        self.out = nn.Linear(4, 4, bias=False).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.calls[0](x)) + self.inner.last.bias


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer, self.scale = nn.Linear(6, 4).double(), 2.0
        self.shift = torch.ones(4, dtype=torch.float64)
        self.others = [torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) * self.scale + self.shift) * self.others[1] + self.others[0]


@torch.jit.script
class Box:
    def __init__(self, value: float):
        self.value = value


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.box = nn.Linear(6, 4).double(), Box(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.box.value


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(6, 4).double(), [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.size(0))
        return self.layer(x) * len(self.seen)


class Shares(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.part, self.parts = inner, inner.first, [inner.last]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.parts[0](torch.tanh(self.part(x)))


class OneWithin(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(6, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.layer(x) * self.count


def scripted(model: nn.Module) -> nn.Module:
    return torch.jit.script(model)  # type: ignore[no-any-return]


def traced(model: nn.Module) -> nn.Module:
    return torch.jit.trace(model, torch.zeros(3, 6, dtype=torch.float64))  # type: ignore[no-any-return]


def compiled(model: nn.Module, num_devices: int = 2, **options: Any) -> mirrorc.Step:
    return compiled_step(model, F.cross_entropy, num_devices, **{"optimizer": SGD, **options})


def train(model: nn.Module, data: list[dict[str, torch.Tensor]], num_devices: int, **options: Any) -> Trained:
    """Trains the very model: a deep copy of one of TorchScript has no parameters that can be trained."""
    optimizer = SGD(model.parameters())
    with compiled(model, num_devices, optimizer=optimizer, **options) as step:
        return Trained(model, optimizer, [float(step(**batch)) for batch in data])


def seeded(function: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    return function()


MAKE: dict[str, Callable[[], nn.Module]] = {
    "scripted": lambda: scripted(Looping()),
    "traced": lambda: traced(Looping()),
    "within": lambda: Around(scripted(Looping())),
}


@pytest.mark.parametrize(
    ("name", "num_devices", "backend"),
    [
        *[("within", 2, "eager"), ("traced", 3, "eager")],
        *[(name, count, "eager") for name in MAKE for count in (1, 2, 3, 4)],
        ("within", 2, "inductor"),
    ],
)
def test_training_is_that_of_one_device(name: str, num_devices: int, backend: str) -> None:
    data, alone = batches(7, 6, 7), MAKE[name]()
    found = train(MAKE[name](), data, num_devices, backend=backend)
    optimizer = SGD(alone.parameters())
    losses = [train_step(alone, optimizer, batch, F.cross_entropy) for batch in data]
    assert_same_training(found, Trained(alone, optimizer, losses), TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"link": "copy", "buckets": 1e-4}])
def test_masks_and_statistics_are_those_of_the_modules_of_python(options: dict[str, Any]) -> None:
    data = batches(7, 6, 7, 8)
    expected = train(Looping(0.4, normalizes=True), data, 2, **AUTOGRAD, **options)
    found = train(scripted(Looping(0.4, normalizes=True)), data, 2, **AUTOGRAD, **options)
    assert_same_bits(found, expected)


def test_what_the_user_does_between_steps_is_seen() -> None:
    model, data = scripted(Looping(0.5)), batches(6, 6, 6, 6)
    plain = Looping(0.5)
    with compiled(model, **AUTOGRAD) as step, compiled(plain, **AUTOGRAD) as other:
        assert seeded(lambda: step(**data[0])) == seeded(lambda: other(**data[0]))
        for own in (model, plain):
            own.eval()
        assert seeded(lambda: step(**data[1])) == seeded(lambda: other(**data[1]))
        for own in (model, plain):
            own.load_state_dict({key: value * 0.5 for key, value in own.state_dict().items()})
            own.first.weight.requires_grad_(False)
        assert seeded(lambda: step(**data[2])) == seeded(lambda: other(**data[2]))
        assert seeded(lambda: step.evaluate(**data[3])) == seeded(lambda: other.evaluate(**data[3]))
        model.first.weight = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"the model's parameter 'first\.weight' was replaced"):
            step(**data[3])


@pytest.mark.fast
def test_the_tracer_says_that_it_cannot_read_a_script() -> None:
    model = Around(scripted(Looping()))
    with pytest.warns(UserWarning, match="'inner' of Around is a ScriptModule, which runs outside of Python"):
        train(model, batches(4), 2)
    with refused(CaptureError, r"(?s)'inner' of Around is a ScriptModule.*before torch\.jit", model):
        train(model, batches(4), 2, capture="dynamo")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: scripted(Counting().double()), "count"),
        (lambda: OneWithin(scripted(Counting().double())), "count"),
        (lambda: scripted(Remembering()), "seen"),
    ],
)
def test_one_that_assigns_its_attributes_is_refused(make: Callable[[], nn.Module], name: str) -> None:
    model = make()
    with refused(CaptureError, f"sets the attribute '{name}' of a module", model), compiled(model, **AUTOGRAD) as step:
        step(**batches(4)[0])


@pytest.mark.fast
def test_one_with_an_object_of_a_class_is_refused() -> None:
    model = Shares(Looping())
    model.boxed = scripted(Boxed())
    with refused(ValueError, r"'boxed' of the model is a ScriptModule with an object.*'box'", model):
        compiled(model)


def test_one_that_was_loaded_trains_once_its_parameters_are_such() -> None:
    written = io.BytesIO()
    torch.jit.save(scripted(Looping()), written)  # type: ignore[no-untyped-call]
    model, data = torch.jit.load(io.BytesIO(written.getvalue())), batches(7, 6)  # type: ignore[no-untyped-call]
    with pytest.raises(
        ValueError, match=r"the model is a ScriptModule whose parameters are plain tensors.*torch\.jit\.load"
    ):
        compiled(model)
    for part in model.modules():
        for name, value in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(value.detach()))
    assert_same_bits(train(model, data, 2), train(scripted(Looping()), data, 2))


@pytest.mark.parametrize("make", [scripted, traced])
def test_bits_do_not_depend_on_what_torchscript_has_optimized_before(make: Callable[[nn.Module], nn.Module]) -> None:
    """It optimizes by its first runs, and runs of one module count for all of its class."""
    model, data = make(Looping()), batches(7, 6)
    for _ in range(4):
        F.cross_entropy(model(data[0]["x"]), data[0]["target"]).backward()
    model.zero_grad()
    assert_same_bits(train(model, data, 2), train(Looping(), data, 2, **AUTOGRAD))


def test_its_other_attributes_are_those_of_each_call() -> None:
    model, plain, data = scripted(Scaled()), Scaled(), batches(6, 6, 6, 6)
    with compiled(model, **AUTOGRAD) as step, compiled(plain, **AUTOGRAD) as other:
        for change in (None, "scale", "shift", "written"):
            for own in (model, plain):
                if change == "scale":
                    own.scale = 3.0
                elif change == "shift":
                    own.shift = torch.full((4,), 0.5, dtype=torch.float64)
                elif change == "written":
                    own.shift.mul_(3.0)
            assert step(**data[0]) == other(**data[0])


def test_a_module_of_python_may_have_a_part_of_it_as_its_own() -> None:
    data = batches(6, 6)
    expected = train(Shares(Looping()), data, 2, **AUTOGRAD)
    found = train(Shares(scripted(Looping())), data, 2, **AUTOGRAD)
    assert_same_training(found, expected, TOLERANCE)  # gradients of what is called twice are added up in any order
