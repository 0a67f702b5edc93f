"""Python numbers that change from step to step: from the second value on they are inputs of a program, and right to the bit."""

import enum
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import selections
import torch
from references import assert_same_model, assert_same_parameters, unchanged
from small_modules import Parts
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc.capture.call.changing_inputs import ChangingNumbers
from mirrorc.errors import CaptureError
from mirrorc.ir.program import ArgumentKind, Program

SETTINGS = {"beta": 1.0}


def twins(model: nn.Module, loss_fn: Any = None, devices: int = 2, **options: Any) -> Twins:
    make = partial(torch.optim.SGD, lr=0.002, momentum=0.5)
    return Twins(model, make, loss_fn, devices, **{"tolerance": 1e-12, **options})


class Plain:
    def __init__(self) -> None:
        self.weight = 1.0


class Scheduled(Parts):
    def __init__(self, plain: Plain) -> None:
        super().__init__(layer=nn.Linear(3, 2), scale=1.0, plain=plain)

    def forward(self, x: torch.Tensor, step: int, options: dict[str, Any]) -> torch.Tensor:
        y = self.layer(x) / options["temperature"] * self.scale + options["shift"][1]
        if step % 10 == 9:
            y = y * 2
        return y * (0.5 * (1 + math.cos(math.pi * step / 100))) - self.plain.weight * y.sin()


@pytest.mark.parametrize("num_devices", [2, 1, 3, *selections.exhaustive((4,))])
def test_forty_values_of_five_numbers_are_three_programs(num_devices: int) -> None:
    torch.manual_seed(0)
    plain, gamma = Plain(), 1.0

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean() * SETTINGS["beta"] + gamma * output.square().mean()

    programs: list[Program] = []
    with twins(Scheduled(plain).double(), loss_fn, num_devices) as pair:
        pair.twin.plain = plain
        for i in range(40):
            SETTINGS["beta"], gamma, plain.weight = 0.01 * (i + 1), 0.5 - 0.01 * i, 1.0 / (i + 1)
            pair.model.scale = pair.twin.scale = 1.0 + 0.01 * i
            options = {"temperature": 0.5 + 0.01 * i, "shift": [1.0, i / 30]}
            pair.train(torch.randn(7, 3).double(), i, options, target=torch.randn(7, 2).double())
            programs.append(pair.step.programs[-1])
        told = pair.step.programs[-1].to_text()
        assert pair.step.memory().devices
        assert_same_parameters(pair.model, pair.twin, 1e-13)
    assert [len({id(program) for program in programs[:n]}) for n in (1, 2, 9, 10, 40)] == [1, 2, 2, 3, 3]
    assert "options_temperature: f64[]" in told and "from_step: f64[]" in told
    assert "remark: from_step is a number: 0.5 * (1 + cos(" in told
    kinds = [argument.kind for argument in programs[-1].arguments]
    assert kinds.count(ArgumentKind.NUMBER) == 7 and kinds.count(ArgumentKind.SEED) == 0


@pytest.mark.parametrize("num_devices", [2, 1, 3, *selections.exhaustive((4,))])
def test_numbers_computed_with_the_size_of_a_microbatch(num_devices: int) -> None:
    torch.manual_seed(0)
    scale = 1.0

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().sum() * (scale / len(target)) + scale * output.sin().mean()

    programs: list[Program] = []
    with twins(nn.Linear(3, 2).double(), loss_fn, num_devices, microbatches=2) as pair:
        for i in range(5):
            scale = 1.0 + 0.1 * i
            kept, last = (
                {"input": torch.randn(size, 3).double(), "target": torch.randn(size, 2).double()} for size in (4, 9)
            )
            pair.step.accumulate(**kept)
            pair.backward(**kept, loss_scale=4 / 13)
            torch.testing.assert_close(pair.step(**last), pair.backward(**last, loss_scale=9 / 13), rtol=1e-12, atol=0)
            pair.update()
            programs.append(pair.step.programs[-1])
        assert_same_parameters(pair.model, pair.twin, 1e-13)
    assert len({id(program) for program in programs}) == 2
    numbers = [argument.name for argument in programs[-1].arguments if argument.kind is ArgumentKind.NUMBER]
    assert numbers == ["from_scale", "from_scale_shard1", "scale"]
    told = [remark for remark in map(str, programs[-1].remarks) if "before each step" in remark]
    assert len({remark.partition(":")[2] for remark in told}) == 2


class Applied(Parts):
    def __init__(self, body: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__(layer=nn.Linear(3, 2), body=body)

    def forward(self, x: torch.Tensor, given: Any = 1.0, **more: Any) -> torch.Tensor:
        return self.body(self.layer(x), given)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def branching(y: torch.Tensor, v: float) -> torch.Tensor:
    if 0.25 < v <= 0.5 or v == 2:
        return y * v
    return y + v if v else y


def schedule(y: torch.Tensor, v: float) -> torch.Tensor:
    return y * (math.exp(-v) + min(1.0, v / 10) + math.sqrt(v) + max(v, 3) ** 2 + round(v, 1) + int(v))


CASES: dict[str, tuple[Callable[..., torch.Tensor], Sequence[Any], int]] = {
    "a schedule": (schedule, [0.5 + i / 7 for i in range(10)], 3),  # max(v, 3) is an int, then a float
    "branches": (branching, [0.1, 0.2, 0.3, 0.4, 2.0, 0.6, 0.0, 0.7, 0.35, 2.0, 0.0], 6),
    "back to the first": (lambda y, v: y * v, [0.5, 0.75, 0.5, 0.25, 0.5], 2),
    "integers, then floats": (lambda y, v: y * v, [1, 2, 3, 0.5, 0.75, 4], 3),
    "a power": (lambda y, v: y.abs() ** v + v**y, [1.5, 2.0, 3.0, 0.5, 2.5], 2),
    "bounds": (lambda y, v: y.clamp(-v, v) + y.clamp(min=v, max=0.9), [0.1, 0.2, 0.3, 1.5], 2),
    "comparisons": (lambda y, v: torch.where(y > v, y, y * v) + y.masked_fill(y < v, v), [0.1, 0.2, 0.3], 2),
    "new tensors": (lambda y, v: y * torch.full((2,), v).double() + torch.tensor(v), [0.1, 0.2, 0.3], 2),
    "both sides": (lambda y, v: (v - y) + v / (y + 9) + (y - v) * v, [0.1, 0.2, 0.3], 2),
    "a part of a tuple": (lambda y, v: y * v[1], [(1.0, 0.5), (1.0, 0.7), (1.0, 0.5)], 2),
    "in place": (lambda y, v: (y * 1).mul_(v).add_(v), [0.1, 0.2, 0.3], 2),
    "an exponential mean": (lambda y, v: torch.lerp(y, y.detach() + 1, v), [0.1, 0.2, 0.3], 2),
    "times another": (lambda y, v: torch.add(y, y.sin(), alpha=v), [0.1, 0.2, 0.3], 2),
    "infinite": (lambda y, v: y.clamp(max=v), [1.0, 2.0, math.inf, 3.0, math.inf, -math.inf], 4),
    "flags": (lambda y, v: y * 2 if v else y, [True, False, True], 2),
    "flags and numbers": (lambda y, v: y * v, [True, 2, 3, False, 4], 4),
    "names of numbers": (lambda y, v: y * v, [Level.LOW, Level.HIGH, 3, 4], 4),
    "numpy's numbers": (lambda y, v: y * float(v), [np.float64(0.5), np.float64(0.7)], 1),
    "scalar tensors": (lambda y, v: y * v, [mirrorc.replicated(torch.tensor(v)) for v in (0.5, 0.7, 0.9)], 1),
    "a part of a tensor": (lambda y, v: y[:, :v] * 1.0, [1, 2, 1, 2], 2),
    "a size": (lambda y, v: y + torch.arange(2 * v)[:2] + torch.ones(v, 2).sum() * 1e-3, [1, 2, 3, 1], 3),
    "a range": (lambda y, v: sum((y * i for i in range(v)), start=y), [1, 2, 3, 1], 3),
    "a hyperparameter": (lambda y, v: F.dropout(y, v, training=False) + F.elu(y, v), [0.1, 0.2, 0.3], 3),
    "its text": (lambda y, v: y * len(f"{v:.1f}"), [0.5, 10.0, 0.5], 2),
    "nothing": (lambda y, v: y, [0.1, 0.2, 0.3], 1),
    "other thirds of a tenth": (
        lambda y, v: y if v + 0.1 + 0.2 > 0.6 else -y,
        [0.1, 0.3, 0.29999999999999993, 0.31],
        3,
    ),
}


def classes(y: torch.Tensor, v: Any) -> torch.Tensor:
    assert isinstance(v, np.generic)
    return y * v if isinstance(v, float) else y + v * 2


OF_NUMPY: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "both sides": (lambda y, v: v * y + y / v - v + v / (y + 9), 1),
    "comparisons": (lambda y, v: torch.where(y > v, y, y.clamp(max=v)) + (v < y), 1),
    "scalars and integers": (lambda y, v: y * (y[0, 0] * v) + (y.detach() > 0).long() * v, 1),
    "a schedule": (lambda y, v: y * (0.5 * (1 + np.cos(np.pi * v / 4)) + math.exp(-v) + v.item()), 1),
    "its own arithmetic": (lambda y, v: y * (v * v / 3 + v**3), 1),
    "a number of Python": (lambda y, v: y * float(v), 1),
    "branches": (lambda y, v: y * v if v > 1.5 else -y, 2),
    "rounded by a comparison": (lambda y, v: y * 2 if v > 0.1 else y, 5),
    "classes": (classes, 1),
    "tensors": (lambda y, v: torch.tensor(v).double() * y + torch.full((2,), v).double(), 5),
    "methods": (lambda y, v: y * v.astype(np.float32).item(), 5),
}


@pytest.mark.fast
@pytest.mark.parametrize(
    "name", ["both sides", *selections.slow(*((name,) for name in OF_NUMPY if name != "both sides"))]
)
def test_numpys_numbers_are_inputs_of_one_program_with_the_dtypes_of_plain_pytorch(name: str) -> None:
    body, most = OF_NUMPY[name]
    kinds = (np.float64, np.float32, np.int64) if name != "both sides" else (np.float32,)
    for kind in kinds:
        torch.manual_seed(1)
        programs = set()
        target = torch.zeros(5, 2, dtype=torch.float64)
        with twins(Applied(body).double(), lambda y, t: y.square().mean() + t.sum() * 0, 1) as pair:
            for value in map(kind, [0.1, 1.3, 2.7, 3.1, 4.9]):
                x = torch.randn(5, 3, dtype=torch.float64)
                expected = pair.plain(x, value, target=target)
                assert pair.step(x, value, target=target).item() == pytest.approx(expected.item(), rel=1e-12), (
                    f"{value}"
                )
                programs.add(id(pair.step.programs[-1]))
            assert_same_parameters(pair.model, pair.twin)
        assert len(programs) <= most, kind


@pytest.mark.fast
def test_an_attribute_that_becomes_numpys_number_is_one_more_program() -> None:
    model = Scheduled(Plain()).double()
    x, target = torch.ones(4, 3).double(), torch.zeros(4, 2).double()
    with compiled_step(model, F.mse_loss) as step:
        for scale in (1.0, *np.linspace(0.1, 0.9, 4)):
            model.scale = scale
            output = model(x, 0, {"temperature": 1.0, "shift": [1.0, 2.0]})
            loss = step(x, 0, {"temperature": 1.0, "shift": [1.0, 2.0]}, target=target)
            torch.testing.assert_close(loss, F.mse_loss(output, target))
        assert "2 compiled programs" in repr(step)


def test_a_size_in_numpys_integer_is_a_program_for_each() -> None:
    model = Applied(lambda y, v: y[:, :v] * 1.0).double()
    with compiled_step(model) as step:
        for value in (1, 2, 1, 2):
            step.evaluate(torch.ones(4, 3).double(), np.int64(value))
        assert "2 compiled programs" in repr(step)


FAST = ("a schedule", "branches")


@pytest.mark.parametrize("name", [*FAST, *selections.slow(*((name,) for name in CASES if name not in FAST))])
def test_what_is_done_with_numbers(name: str) -> None:
    body, values, most = CASES[name]
    torch.manual_seed(1)
    programs = set()
    target = torch.zeros(5, 2, dtype=torch.float64)
    with twins(Applied(body).double(), lambda y, t: y.square().mean() + t.sum() * 0) as pair:
        for value in values:
            x = torch.randn(5, 3, dtype=torch.float64)
            is_whole = isinstance(value, mirrorc.capture.call.call_arguments.Replicated)
            expected = pair.plain(x, value.value if is_whole else value, target=target)
            assert pair.step(x, value, target=target).item() == pytest.approx(expected.item(), rel=1e-12), f"{value}"
            programs.add(id(pair.step.programs[-1]))
        assert_same_parameters(pair.model, pair.twin)
    assert len(programs) <= most


@pytest.mark.fast
def test_a_number_that_cannot_be_computed_with_is_the_users_error() -> None:
    model = Applied(lambda y, v: y * (1 / v)).double()
    x, y = torch.ones(4, 3, dtype=torch.float64), torch.zeros(4, 2).double()
    with compiled_step(model, F.mse_loss) as step:
        for value in (1.0, 2.0, 4.0):
            step(x, value, target=y)
        with unchanged(model), pytest.raises(CaptureError, match="division"):
            step(x, 0.0, target=y)
        step(x, 8.0, target=y)
        assert "2 compiled programs" in repr(step)


def test_float32_and_autocast_have_the_bits_of_plain_pytorch() -> None:
    torch.manual_seed(0)
    model = Applied(lambda y, v: (y * v + v / (y * y + 1.0)).sum(0, keepdim=True) * v)
    y = torch.ones(1, 2)
    with twins(model, lambda y, t: (y.float() - t).square().mean() * 0.5, 1) as pair:
        for i in range(12):
            x = torch.randn(4, 3)
            with torch.autocast("cpu", torch.bfloat16, enabled=i >= 6):
                expected = pair.plain(x, 0.1 * (i + 1), target=y)
                assert pair.step(x, 0.1 * (i + 1), target=mirrorc.replicated(y)).item() == expected.item(), i
        assert_same_model(pair.model, pair.twin, 0.0)
        assert "3 compiled programs" in repr(pair.step)


class Returning(Parts):
    def forward(self, x: torch.Tensor, step: int, scale: float) -> dict[str, Any]:
        y = self.layer(x) * scale
        return {"loss": y.square().mean(), "step": step, "half": step / 2, "y": y}


def test_numbers_that_forward_returns_are_those_of_the_step() -> None:
    model = Returning(layer=nn.Linear(3, 2)).double()
    with compiled_step(model, return_outputs=True) as step:
        for i in (3, 5, 8, 5):
            x = torch.randn(4, 3).double()
            expected = model.layer(x).detach() * (i / 7)
            _, outputs = step(x, i, i / 7)
            assert (outputs["step"], outputs["half"]) == (i, i / 2)
            assert torch.allclose(outputs["y"], expected)


def test_an_attribute_that_nothing_reads_compiles_once_more() -> None:
    class Counting(Applied):
        count = 0

    model = Counting(lambda y, v: y)
    model.seen = 0
    with compiled_step(model, F.mse_loss) as step:
        for i in range(6):
            model.seen = i
            step(torch.ones(4, 3), target=torch.zeros(4, 2))
        assert "2 compiled programs" in repr(step)


def test_a_program_with_numbers_is_saved_and_read_back(tmp_path: Path) -> None:
    model = Applied(lambda y, v: y * v)
    with compiled_step(model, F.mse_loss) as step:
        for v in (0.5, 0.75):
            step(torch.ones(5, 3), v, target=torch.zeros(5, 2))
        program = step.programs[-1]
    program.save(tmp_path / "program.mirror")
    again = Program.load(tmp_path / "program.mirror")
    assert again.arguments == program.arguments
    assert [a.name for a in again.arguments if a.kind is ArgumentKind.NUMBER] == ["given"]
    assert again.to_text(regions=True) == program.to_text(regions=True)


@pytest.fixture
def numbers() -> Iterator[ChangingNumbers]:
    yield ChangingNumbers()


@pytest.mark.fast
def test_numbers_that_are_given_up_are_no_inputs(numbers: ChangingNumbers) -> None:
    numbers.add(["a", "b"])
    numbers.give_up(["a"], "it is a size", ["length"])
    assert numbers.inputs == {"b"} and numbers.reasons == ["length: it is a size"]
    with numbers.left_out():
        assert not numbers.inputs
    assert numbers.inputs == {"b"} and not ChangingNumbers(can_be_inputs=False).inputs


@pytest.mark.parametrize("num_devices", [1, 2])
def test_with_inductor(num_devices: int) -> None:
    torch.manual_seed(0)
    model = Applied(lambda y, v: (y * v).tanh() / (1.5 + v))
    with twins(model, F.mse_loss, num_devices, backend="inductor", tolerance=1e-5) as pair:
        for i in range(4):
            pair.train(torch.randn(5, 3), 0.1 * (i + 1), target=torch.zeros(5, 2))
        assert "2 compiled programs" in repr(pair.step)


class Tempered(Parts):
    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> None:
        super().__init__(words=nn.Embedding(20, 8), head=nn.Linear(8, 4), use=use)

    def forward(self, x: torch.Tensor, t: float) -> torch.Tensor:
        return self.head(self.use(self.words(x), x, t).tanh().mean(1))


BESIDE_SIZES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor], int]] = {
    "divides": (lambda h, x, t: h / t, 2),
    "branches on the number": (lambda h, x, t: h if t < 2.0 else h * t, 3),
    "branches on a size": (lambda h, x, t: h * t if x.size(1) > 6 else h / t, 3),
    "stands beside places": (lambda h, x, t: h * t + torch.arange(x.size(1))[:, None], 2),
    "stands beside a mean": (lambda h, x, t: h * t / x.size(1), 2),
    "stands beside half a length": (lambda h, x, t: h[:, : x.size(1) // 2] * t, 2),
    "stands beside flattened sizes": (lambda h, x, t: (h * t).flatten(0, 1).unflatten(0, x.shape), 2),
    "is multiplied by a size": (lambda h, x, t: h / (t * x.size(1)), 10),
    "fills a size": (lambda h, x, t: h * torch.full((x.size(1), 8), t, dtype=h.dtype), 10),
    "is compared with a size": (lambda h, x, t: h * (t if x.size(1) * t > 10 else 1.0), 10),
    "is a length": (lambda h, x, t: h[:, : int(t)], 10),
}
"""What is done with a number beside sizes that change, and the number of programs of ten such calls."""


@pytest.mark.parametrize("name", BESIDE_SIZES)
def test_numbers_beside_sizes_that_change(name: str) -> None:
    torch.manual_seed(0)
    use, most = BESIDE_SIZES[name]
    with twins(Tempered(use).double(), F.mse_loss) as pair:
        for i in range(10):
            size, length = 8 + 4 * (i % 3), 4 + i % 5
            x, y = torch.randint(20, (size, length)), torch.randn(size, 4).double()
            pair.train(x, 1.0 + 0.25 * i, target=y)
        assert len(pair.step.programs) <= most
        assert_same_parameters(pair.model, pair.twin, 1e-12)
        remarks = [remark.text for remark in pair.step.program.remarks if remark.text.startswith("sizes of arguments")]
        assert bool(remarks) == (most == 10 and name != "is a length")


def test_the_warning_of_many_compilations_says_which_number_keeps_sizes_from_being_symbols() -> None:
    use, _ = BESIDE_SIZES["is multiplied by a size"]
    with twins(Tempered(use).double(), F.mse_loss) as pair, pytest.warns(UserWarning, match="MC3403") as warned:
        for i in range(10):
            pair.train(torch.randint(20, (8, 4 + i)), 1.0 + i, target=torch.randn(8, 4).double())
    (text,) = (str(warning.message) for warning in warned if "MC3403" in str(warning.message))
    assert "sizes are numbers: t changes, too, and cannot be an input beside them" in text
    assert "mirrorc.replicated(torch.tensor(" in text


# Python numbers that are nan, which differs from itself: what is read has a program, and not a new one in each step.


class Read(Parts):
    def __init__(self) -> None:
        super().__init__(layer=nn.Linear(3, 2), scale=1.0)

    def forward(self, x: torch.Tensor, number: Any = None) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        if number is None:
            number = self.scale
        if isinstance(number, tuple):
            number = number[0] + number[1][0]
        return y + number


def set_scale(model: Read, number: float) -> None:
    model.scale = number


PLACES: dict[str, tuple[Callable[[Read, float], Any], int]] = {
    "an argument": (lambda model, number: number, 3),
    "an attribute": (set_scale, 3),
    "a part of a tuple": (lambda model, number: (0.0, (number,)), 4),  # each value of a tuple has a program
    "numpy's float64": (lambda model, number: np.float64(number), 2),
    "numpy's float32": (lambda model, number: np.float32(number), 2),
}
"""How the model gets a number, and how many programs serve 1, 2, 3 and nan."""


def nan_numbers() -> list[float]:
    """Nan as one object, which is equal to itself in a tuple, and as new ones."""
    nan, new, other = math.nan, float("nan"), float("nan")
    return [1.0, nan, nan, new, 2.0, other, 3.0, nan, new]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (torch.nan_to_num(output, nan=0.5) - target).square().mean()


@pytest.mark.parametrize("place", PLACES)
def test_nan_again_is_no_new_program_and_outputs_are_nan(place: str) -> None:
    give, num_programs = PLACES[place]
    torch.manual_seed(0)
    programs: list[int] = []
    of_nan = set()
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with Twins(Read().double(), make, loss_fn, return_outputs=True) as pair:
        for number in nan_numbers():
            x, target = torch.randn(5, 3, dtype=torch.float64), torch.zeros(5, 2, dtype=torch.float64)
            expected = pair.twin(x, give(pair.twin, number)).detach()
            loss, outputs = pair.step(x, give(pair.model, number), target=target)
            torch.testing.assert_close(outputs, expected, equal_nan=True)
            torch.testing.assert_close(loss, pair.plain(x, give(pair.twin, number), target=target))
            assert outputs.isnan().all() if math.isnan(number) else outputs.isfinite().all()
            programs.append(id(pair.step.programs[-1]))
            if math.isnan(number):
                of_nan.add(programs[-1])
        pair.check()
    assert len(of_nan) == 1 and len(set(programs)) == num_programs


@pytest.mark.fast
def test_a_loss_that_is_nan_is_that_of_plain_pytorch() -> None:
    model = Read().double()
    with compiled_step(model, nn.functional.mse_loss) as step:
        for number in (1.0, math.nan, 2.0):
            loss = step(torch.ones(4, 3).double(), number, target=torch.zeros(4, 2).double())
            assert loss.isnan() == (number != 1.0)
    assert all(parameter.isnan().all() for parameter in model.parameters())
