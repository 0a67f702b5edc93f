"""What a captured step does not do again is refused, or said once, at the user's line; what is harmless is not spoken of."""

import collections
import copy
import functools
import itertools
import logging
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import refused, unchanged
from torch import nn
from twins import compiled_step

from mirrorc import CaptureError

# Its tracer knows no assignments to attributes of classes, and no iterators from elsewhere: it refuses them in its own words.
IS_OLD = torch.__version__.startswith("2.11.")

counts = {"steps": 0}
missing: dict[str, list[int]] = collections.defaultdict(list)
met: collections.Counter[str] = collections.Counter()
activations: list[torch.Tensor] = []


class Net(nn.Module):
    def __init__(self, does: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(3, 3), does
        self.acts: list[torch.Tensor] = []
        self.metrics: dict[str, Any] = {}
        self.steps = 0
        self.auxiliary: list[torch.Tensor] = []
        self.configuration = Configuration()

    def log(self, name: str, value: torch.Tensor) -> None:
        self.metrics[name] = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        added = self.does(self, y)
        return y if added is None else y + added


def count(net: Net, y: torch.Tensor) -> None:
    net.steps += 1


def count_elsewhere(net: Net, y: torch.Tensor) -> None:
    counts["steps"] += 1


def add_auxiliary_losses(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.auxiliary.append(y.mean())
    total = torch.stack(net.auxiliary).sum()
    net.auxiliary.clear()
    return total


class Configuration:
    """As Hugging Face's: forward notes there what it finds out."""

    problem: str | None = None


def find_out(net: Net, y: torch.Tensor) -> None:
    if net.configuration.problem is None:
        net.configuration.problem = "regression" if y.dim() == 2 else "classification"


class Shared:
    steps = 0
    problem: str | None = None


class Inherits(Shared):
    pass


def count_on_a_class(net: Net, y: torch.Tensor) -> None:
    Shared.steps += 1


def count_on_a_class_that_inherits(net: Net, y: torch.Tensor) -> None:
    Inherits.steps += 1


def write_a_class(net: Net, y: torch.Tensor) -> None:
    Shared.steps = 7


def find_out_on_a_class(net: Net, y: torch.Tensor) -> None:
    if Shared.problem is None:
        Shared.problem = "regression"
    if Inherits.problem is None:
        Inherits.problem = "regression"


def train(model: nn.Module, loss_fn: Any = F.mse_loss, **options: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught, compiled_step(model, loss_fn, **options) as step:
        warnings.simplefilter("always")
        for num_examples in (4, 4, 5):
            step(torch.ones(num_examples, 3), target=torch.zeros(num_examples, 3))
    return caught


SAID: list[tuple[Callable[[Any, torch.Tensor], object], tuple[str, ...]]] = [
    (lambda net, y: net.acts.append(y), ("Net changes model.acts", "net.acts.append(y)", "return it from forward")),
    (lambda net, y: net.log("loss", y.detach()), ("Net changes model.metrics['loss']", "self.metrics[name] = value")),
    (
        lambda net, y: logging.getLogger("mirrorc_tests.net").warning("shape %s", y.shape),
        (
            "logger.warning in Net ran once, during capture, and runs in no later call",
            'logging.getLogger("mirrorc_tests.net")',
        ),
    ),
    (lambda net, y: missing["k"].append(1), ("Net changes missing['k']", 'missing["k"].append(1)')),
    (lambda net, y: met.update(["k"]), ("Net changes met['k']", 'met.update(["k"])')),
    *([] if IS_OLD else [(write_a_class, ("Net changes Shared.steps", "Shared.steps = 7"))]),
    (lambda net, y: print("shape", y.shape), ("print in Net ran while the step was traced", "Call it between steps")),  # noqa: T201
]


def test_what_is_not_done_again_is_said_once_at_its_line() -> None:
    for does, words in SAID:
        model = Net(does)
        (warning,) = train(model)
        assert warning.filename == __file__ and all(word in str(warning.message) for word in words), warning.message
        assert not model.acts and not model.metrics
    (warning,) = train(Net(SAID[0][0]), return_outputs=True)
    assert "Net changes model.acts" in str(warning.message)


def test_what_a_hook_or_a_loss_keeps_in_a_local_variable_is_spoken_of_by_its_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_forward_hook(lambda module, given, output: activations.append(output))
    (warning,) = train(model)
    assert "Sequential changes activations in forward" in str(warning.message) and warning.filename == __file__
    assert activations == []
    acts: list[torch.Tensor] = []
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    model[1][0].register_forward_hook(lambda module, given, output: acts.append(output))
    (warning,) = train(model)
    assert "Sequential changes acts in a forward hook of module '1.0', which" in str(warning.message)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        acts.append(output)
        return F.mse_loss(output, target)

    (warning,) = train(nn.Linear(3, 3), loss)
    assert re.search(
        r"Linear changes acts in loss_fn, which .*\n  at:   .*test_dropped_effects\.py:\d+  acts\.append\(output\)\n",
        str(warning.message),
    )
    assert acts == []


def test_what_leaves_nothing_behind_is_not_spoken_of() -> None:
    assert train(Net(add_auxiliary_losses)) == [] == train(Net(find_out))
    if not IS_OLD:
        assert train(Net(find_out_on_a_class)) == []
    assert Shared.problem is None and "problem" not in vars(Inherits)
    assert train(Net(find_out), return_outputs=True) == []
    assert train(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.1))) == []


@pytest.mark.fast
def test_numbers_that_python_would_give_anew_in_each_step_are_refused() -> None:
    generator, counter = random.Random(0), itertools.count()
    cases: dict[str, tuple[str, Callable[[Any, torch.Tensor], object]]] = {
        "a generator": ("draws a number at random outside of torch", lambda net, y: y * generator.random()),
        "a counter": ("cannot capture" if IS_OLD else "(?s)reads and changes .*", lambda net, y: y * next(counter)),
    }
    for name, (words, does) in cases.items():
        model, state = Net(does), random.getstate()
        with (
            unchanged(model),
            pytest.raises(CaptureError, match=f"{words}\n.*test_dropped_effects.py:(?s:.*)fix") as refused,
        ):
            train(model, capture="dynamo")
        assert random.getstate() == state and next(counter) == list(cases).index(name), (name, str(refused.value))


@functools.cache
def kept(kind: str) -> torch.Tensor:
    return torch.ones(3) if kind == "constant" else torch.rand(3) if kind == "drawn" else torch.empty(3).bernoulli_(0.5)


def test_random_numbers_that_a_function_keeps_are_refused() -> None:
    for kind in ("drawn", "drawn in place"):
        model = Net(lambda net, y: y * kept(kind))  # noqa: B023
        with refused(CaptureError, r"(?s)keeps its random numbers.*test_dropped_effects\.py:.*fix:", model):
            train(model)
    assert train(Net(lambda net, y: y * kept("constant"))) == []


@pytest.mark.fast
@pytest.mark.parametrize(
    ("does", "words"),
    [
        (count, ("MC2301", "test_dropped_effects.py:", "net.steps += 1", "self.x.copy_(value)")),
        (
            count_elsewhere,
            ("reads and changes counts['steps']", "test_dropped_effects.py:", "fix:  keep it in a buffer"),
        ),
        (count_on_a_class, ("" if IS_OLD else "reads and changes Shared.steps", "Shared.steps += 1", "fix:  ")),
        (count_on_a_class_that_inherits, ("" if IS_OLD else "reads and changes Inherits.steps", "Inherits.steps += 1")),
    ],
)
def test_state_that_steps_would_go_on_from_is_refused(does: Any, words: tuple[str, ...]) -> None:
    model = Net(does)
    with unchanged(model), pytest.raises(CaptureError) as refused:
        train(model, capture="dynamo")
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert model.steps == 0 == counts["steps"] == Shared.steps and "steps" not in vars(Inherits)


missed: dict[str, int] = collections.defaultdict(int)
log: list[Any] = []
cache: dict[str, torch.Tensor] = {}
found: set[str] = set()
recent: collections.deque[torch.Tensor] = collections.deque(maxlen=3)


class Notes:
    """An object that is no module, which forward may write."""


notes = Notes()


def count_what_is_missing() -> float:
    missed["a"] += 1
    return float(missed["a"])


def count_by_length() -> float:
    log.append(1)
    return float(len(log))


def draw_once() -> torch.Tensor:
    if "first" not in cache:
        cache["first"] = torch.rand(())
    return cache["first"]


def draw_once_for_an_attribute() -> Any:
    if not hasattr(notes, "first"):
        notes.first = torch.rand(())  # type: ignore[attr-defined]
    return notes.first  # type: ignore[attr-defined]


def count_a_set() -> float:
    number = len(found)
    found.add("a")
    return number + 1.0


def mean_of_recent(y: torch.Tensor) -> Any:
    recent.append(y.mean())
    return sum(recent)


@pytest.mark.parametrize(
    ("does", "name"),
    [
        (lambda net, y: y * count_what_is_missing(), "missed['a']"),
        (lambda net, y: y * count_by_length(), "log"),
        (lambda net, y: y * draw_once(), "cache['first']"),
        (lambda net, y: y * draw_once_for_an_attribute(), "notes.first"),
        (lambda net, y: y * count_a_set(), "found"),
        (lambda net, y: mean_of_recent(y), "recent"),
    ],
)
def test_a_change_that_the_next_step_would_read_is_refused_though_nothing_was_there(does: Any, name: str) -> None:
    model = Net(does)
    with (
        unchanged(model),
        pytest.raises(CaptureError, match=r"(?s)reads and changes .*test_dropped_effects\.py:") as refused,
    ):
        train(model, capture="dynamo")
    assert f"reads and changes {name}\n" in str(refused.value)
    assert not missed and not log and not cache and not found and not recent and not vars(notes)


@pytest.mark.parametrize("entry", [lambda y: y, lambda y: {"of": [y, 1], "shape": (y.shape, None)}])
def test_what_is_only_collected_is_spoken_of(entry: Any) -> None:
    model = Net(lambda net, y: log.append(entry(y)))
    (warning,) = train(model)
    assert "Net changes log in" in str(warning.message) and not log


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.steps += 1
            self.mean = self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.layer(x - self.mean)


def test_a_buffer_that_an_assignment_writes_in_place_is_written_in_each_step() -> None:
    torch.manual_seed(0)
    model = Statistics().double()
    plain = copy.deepcopy(model)
    x = torch.randn(3, 3, dtype=torch.float64).repeat(2, 1)  # shards of one mean
    with compiled_step(
        model, F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), capture="dynamo"
    ) as step:
        for _ in range(3):
            step(x, target=x)
            plain(x)
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    assert model.get_buffer("steps") == 3
