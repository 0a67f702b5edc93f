"""Python state that forward or loss advances: as in plain PyTorch once a step, wherever it is kept, or refused by its name."""

import collections
import contextlib
import copy
import functools
import gc
import io
import itertools
import queue
import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from references import assert_same_parameters, unchanged
from torch import nn
from torch.nn import functional as F
from twins import compiled_step, sgd

from mirrorc import CaptureError, ExecutionError, MirrorcError
from mirrorc.capture.model.function_module import used_globals

pytestmark = [pytest.mark.fast, pytest.mark.filterwarnings("ignore:MC2701")]

count = 0

state_package = ModuleType("state_package")
state_package.inner = ModuleType("state_package.inner")
for _module in (state_package, state_package.inner):
    _module.__file__ = __file__
exec("num = 0\ndef advance():\n    global num\n    num += 1\n    return num\n", vars(state_package.inner))


class Counter:
    of_class = 0

    def __init__(self) -> None:
        self.of_object = 0

    def of_method(self) -> int:
        self.of_object += 1
        return self.of_object


class Slotted:
    __slots__ = ("of_slot",)

    def __init__(self) -> None:
        self.of_slot = 0


class Net(nn.Module):
    """Two layers, with a number between that ``place`` keeps."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        self.place, self.calls = place, 0
        self.table, self.listed, self.nested = {"n": 0}, [0], {"of": [{"n": 0}]}
        self.seen: set[int] = set()
        self.recent: collections.deque[int] = collections.deque(maxlen=3)
        self.counter, self.slotted, self.closure = Counter(), Slotted(), counting()
        self.pair = (0, "steps")

    def next_number(self) -> int:
        global count
        match self.place:
            case "attribute":
                self.calls += 1
                return self.calls
            case "tuple":
                self.pair = (self.pair[0] + 1, "steps")
                return self.pair[0]
            case "dict":
                self.table["n"] += 1
                return self.table["n"]
            case "list":
                self.listed.append(1)
                return len(self.listed)
            case "nested":
                self.nested["of"][0]["n"] += 1
                return self.nested["of"][0]["n"]
            case "set":
                self.seen.add(len(self.seen))
                return len(self.seen)
            case "deque":
                self.recent.append(sum(self.recent) + 1)
                return self.recent[-1]
            case "object":
                return self.counter.of_method()
            case "slot":
                self.slotted.of_slot += 1
                return self.slotted.of_slot
            case "class":
                Counter.of_class += 1
                return Counter.of_class
            case "global":
                count += 1
                return count
            case "function":
                return counts_on_itself()
            case "closure":
                return self.closure()
            case "decorated":
                return counts_without_gradients()
            case "context manager":
                with counted():
                    return count
            case "cached function":
                return counts_behind_a_cache(len(self.table))
            case "submodule of a package":
                return state_package.inner.advance()
        raise AssertionError(self.place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)) * self.next_number())


def counting() -> Callable[[], int]:
    n = 0

    def counts() -> int:
        nonlocal n
        n += 1
        return n

    return counts


@torch.no_grad()
def counts_without_gradients() -> int:
    global count
    count += 1
    return count


@contextlib.contextmanager
def counted() -> Iterator[None]:
    global count
    count += 1
    yield


def unkept(function: Any) -> Any:
    """As ``functools.cache``, but for a cache."""
    return functools.wraps(function)(functools.partial(function))


@unkept
def counts_behind_a_cache(key: int) -> int:
    global count
    count += key
    return count


def counts_on_itself() -> int:
    counts_on_itself.calls = getattr(counts_on_itself, "calls", 0) + 1  # type: ignore[attr-defined]
    return counts_on_itself.calls  # type: ignore[attr-defined]


def reset() -> None:
    global count
    count = Counter.of_class = state_package.inner.num = 0
    vars(counts_on_itself).clear()


PLACES = [
    *("attribute", "tuple", "dict", "list", "nested", "set", "deque", "object", "slot", "class", "global", "function"),
    *("closure", "decorated", "context manager", "cached function", "submodule of a package"),
]


def data_of(*sizes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 3, generator=generator).double(), torch.randn(n, 2, generator=generator).double())
        for n in sizes
    ]


def train_plainly(model: nn.Module, loss_fn: Any, *sizes: int) -> None:
    optimizer = sgd(model.parameters())
    for x, y in data_of(*sizes):
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def assert_trains_as_plainly(
    make: Callable[[], tuple[nn.Module, Any]], *sizes: int, devices: int = 2, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """The two models, of which ``make`` makes each with a loss of its own."""
    found = []
    for is_plain in (True, False):
        reset()
        torch.manual_seed(0)
        model, loss_fn = make()
        found.append(model)
        if is_plain:
            train_plainly(model, loss_fn, *sizes)
            continue
        with compiled_step(model, loss_fn, devices, **options) as step:
            for x, y in data_of(*sizes):
                step(x, y)
    assert_same_parameters(found[1], found[0])
    return found[0], found[1]


@pytest.mark.parametrize("place", PLACES)
def test_a_counter_advances_once_a_step_wherever_it_is_kept(place: str) -> None:
    assert_trains_as_plainly(lambda: (Net(place), F.mse_loss), 6, 5, 6, capture="autograd")


@pytest.mark.parametrize("devices", [1, 3])
def test_a_counter_advances_once_on_any_number_of_devices(devices: int) -> None:
    plain, found = assert_trains_as_plainly(lambda: (Net("dict"), F.mse_loss), 6, 7, devices=devices)
    assert (plain.table, found.table) == ({"n": 2}, {"n": 2})


def test_replicas_in_turn_do_not_wait_for_each_others_gradients() -> None:
    """Sums of some layers would be awaited within a backward, and the other backwards wait for its end."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)), nn.Linear(3, 2)).double()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layers(x) * self.calls

    options: Any = {
        "capture": "autograd",
        "link": "copy",
        "buckets": 0.0001,
        "disable": ("share-parameters", "schedule-overlap"),
        "timeout": 20.0,
    }
    assert_trains_as_plainly(lambda: (Deep(), F.mse_loss), 6, 6, 6, devices=3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_what_cannot_be_captured_for_its_state_trains_as_plain_pytorch(place: str) -> None:
    assert_trains_as_plainly(lambda: (Net(place), F.mse_loss), 6, 5, 6)


@pytest.mark.slow
def test_microbatches_and_accumulation_advance_it_once_a_call() -> None:
    plain, found = assert_trains_as_plainly(
        lambda: (Net("attribute"), F.mse_loss), 8, 8, microbatches=2, capture="autograd"
    )
    assert (plain.calls, found.calls) == (2, 2)
    reset()
    model, (batch, other) = Net("attribute"), data_of(6, 4)
    with compiled_step(model, F.mse_loss, capture="autograd") as step:
        step.accumulate(*batch)
        assert model.calls == 1
        step(*other)
        assert model.calls == 2
        step.evaluate(*batch[:1], target=batch[1])
        assert model.calls == 3


def anneals() -> Callable[..., torch.Tensor]:
    state = {"n": 0}

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        state["n"] += 1
        value = F.mse_loss(output, target) * state["n"]
        if torch.isnan(value):
            raise ValueError("nan")
        return value

    return loss


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_loss_that_counts_beside_a_check_for_nan(devices: int) -> None:
    assert_trains_as_plainly(lambda: (layers(), anneals()), 6, 6, 6, devices=devices)


class Masks(nn.Module):
    """Keeps a mask of the largest length so far, as language models do."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer, self.place = nn.Linear(3, 3).double(), place
        self.mask: torch.Tensor | None = None
        self.masks: dict[int, torch.Tensor] = {}

    def mask_of(self, length: int) -> torch.Tensor:
        if self.place == "attribute":
            if self.mask is None or len(self.mask) < length:
                self.mask = torch.full((length, length), -1.0).double().triu(1)
            return self.mask[:length, :length]
        if length not in self.masks:
            self.masks[length] = torch.full((length, length), -1.0).double().triu(1)
        return self.masks[length]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) @ self.mask_of(3)


def loss_of_two(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[:, :2], target)


@pytest.mark.parametrize("place", ["attribute", "dict"])
def test_a_cached_mask_is_kept_as_in_plain_pytorch(place: str) -> None:
    plain, found = assert_trains_as_plainly(lambda: (Masks(place), loss_of_two), 6, 5)
    masks = [[model.mask, *model.masks.values()] for model in (plain, found)]  # type: ignore[attr-defined]
    assert len(masks[0]) == len(masks[1])
    assert all(torch.equal(a, b) for a, b in zip(*masks, strict=True) if a is not None)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_model_whose_cache_is_filled_is_captured(evaluates: bool) -> None:
    how = []
    with compiled_step(Masks("attribute"), loss_of_two) as step:
        for x, y in data_of(6, 6, 6, 6):
            step(x, y)
            how.append(step.metrics()["programs/compiled"])
            if evaluates:
                step.evaluate(x, target=y)
        assert "autograd" not in step.program.to_text()
    assert evaluates or how == [1.0, 1.0, 2.0, 2.0]


class Routes(nn.Module):
    """Leaves an auxiliary loss in an attribute of each part, which the model adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.last = nn.ModuleList(nn.Linear(3, 3).double() for _ in range(2)), nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
            part.auxiliary = x.pow(2).sum(1, keepdim=True)  # type: ignore[assignment]
        return self.last(x) + sum(part.auxiliary for part in self.parts)


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_attributes_that_are_assigned_before_they_are_read_are_values_of_the_call(capture: str) -> None:
    with pytest.warns(UserWarning, match=r"MC3304: .* sets attributes of modules \('auxiliary'\)"):
        plain, found = assert_trains_as_plainly(lambda: (Routes(), F.mse_loss), 6, 5, 6, capture=capture)
    assert hasattr(plain.parts[0], "auxiliary") and not hasattr(found.parts[0], "auxiliary")  # type: ignore[index]


def test_a_model_and_its_state_are_freed_with_the_step() -> None:
    model = Net("dict")
    ((x, y),) = data_of(4)
    with compiled_step(model, F.mse_loss, capture="autograd") as step:
        step(x, y)
    gone = weakref.ref(model)
    del model, step
    gc.collect()
    assert gone() is None


def test_a_large_list_is_watched_by_its_length() -> None:
    large = [0.0] * 20_000

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        large.append(1.0)
        return F.mse_loss(output, target)

    ((x, y),) = data_of(4)
    words = r"MC2304: .* writes large in place"
    with compiled_step(layers(), loss_of, capture="autograd") as step, pytest.raises(CaptureError, match=words):
        step(x, y)


def test_names_of_attributes_are_no_globals() -> None:
    """``output.data`` has nothing to do with a global ``data``, which may be large."""
    assert used_globals(_reads_an_attribute.__code__) == {"F"}


def _reads_an_attribute(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output.data, target)


def test_an_iterator_that_only_a_later_step_takes_from_is_refused() -> None:
    source, kept = iter(range(9)), {"n": 0}

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept["n"] += 1
        return F.mse_loss(output, target) * (next(source) if kept["n"] > 2 else 1.0)

    ((x, y),) = data_of(4)
    with compiled_step(layers(), loss_of, capture="autograd") as step:
        step(x, y)
        step(x, y)
        with pytest.raises(MirrorcError, match="MC2303"):
            step(x, y)
    assert next(source) == 0


def test_a_step_that_fails_advances_nothing() -> None:
    model = Net("attribute")

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target.sum() > 1e6:
            raise ValueError("too large")
        return F.mse_loss(output, target)

    ((x, y),) = data_of(6)
    with compiled_step(model, loss_of, capture="autograd") as step:
        step(x, y)
        with unchanged(model), pytest.raises(ExecutionError, match="too large"):
            step(x, y + 1e9)
        assert model.calls == 1
        step(x, y)
    assert model.calls == 2


def test_state_that_only_a_later_run_changes_is_not_advanced_by_each_replica() -> None:
    model, kept = layers(), {"n": 0}

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if target.mean() > 100.0:
            kept["n"] += 1
        return F.mse_loss(output, target)

    ((x, y),) = data_of(6)
    with compiled_step(model, loss_of, capture="autograd") as step:
        step(x, y)
        with unchanged(model), pytest.raises(ExecutionError, match=r"changed kept\['n'\](?s:.*)make the call again"):
            step(x, y + 1e3)
        assert kept == {"n": 0}
        step(x, y + 1e3)
        assert kept == {"n": 1}


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(3, 2).double(), torch.zeros(2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


def test_a_mean_of_the_batch_is_kept_on_one_device_and_refused_on_more() -> None:
    plain, found = assert_trains_as_plainly(lambda: (Averages(), F.mse_loss), 6, 6, devices=1)
    assert torch.equal(plain.mean, found.mean)  # type: ignore[arg-type]
    model, ((x, y),) = Averages(), data_of(6)
    before = model.mean
    words = r"changes model\.mean, and each replica leaves another value"
    with compiled_step(model, F.mse_loss) as step, unchanged(model), pytest.raises(CaptureError, match=words):
        step(x, y)
    assert model.mean is before


def test_a_tensor_with_a_graph_is_not_kept() -> None:
    kept: list[torch.Tensor] = []

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept.append(output)
        return F.mse_loss(output, target)

    ((x, y),) = data_of(4)
    for devices in (1, 2):
        with compiled_step(layers(), loss_of, devices, capture="autograd") as step:
            with pytest.raises(CaptureError, match=r"leaves a tensor with a gradient in kept(?s:.*)value\.detach\(\)"):
                step(x, y)
            assert not kept


def test_what_backward_changes_is_refused() -> None:
    model, calls = layers(), [0]
    model[1].register_full_backward_hook(lambda *_: calls.append(1))
    ((x, y),) = data_of(4)
    with compiled_step(model, F.mse_loss, capture="autograd") as step:
        with pytest.raises(CaptureError, match=r"backward of .* changes calls"):
            step(x, y)
        assert calls == [0]


# What cannot be put back


def _file() -> Iterator[str]:
    return io.StringIO("1\n2\n3\n4\n5\n6\n7\n8\n")


def _queue() -> queue.Queue[float]:
    numbers: queue.Queue[float] = queue.Queue()
    for number in range(1, 9):
        numbers.put(float(number))
    return numbers


SOURCES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "count": (lambda: itertools.count(1), next),
    "cycle": (lambda: itertools.cycle([1.0, 2.0]), next),
    "generator": (lambda: (float(n) for n in range(1, 99)), next),
    "list_iterator": (lambda: iter([1.0, 2.0, 3.0, 4.0]), next),
    "StringIO": (_file, lambda file: float(file.readline())),
    "Queue": (_queue, lambda numbers: numbers.get(timeout=5)),
    "DataLoader": (lambda: iter(torch.utils.data.DataLoader([1.0, 2.0, 3.0], batch_size=None)), next),
}


@pytest.mark.parametrize("capture", ["autograd", "auto"])
@pytest.mark.parametrize("name", SOURCES)
def test_an_iterator_a_file_and_a_queue_are_refused_before_anything_is_taken(name: str, capture: str) -> None:
    make, take = SOURCES[name]
    source, untouched = make(), make()
    holders: dict[str, Any] = {"dict": {"of": source}, "list": [source], "tuple": (0, source)}
    holders["deque"] = collections.deque([source])
    holders["partial"] = functools.partial(take, source)

    def of_closure() -> Any:
        return take(source)

    takes = {
        "closure": of_closure,
        "dict": lambda: take(holders["dict"]["of"]),
        "list": lambda: take(holders["list"][0]),
        "tuple": lambda: take(holders["tuple"][1]),
        "deque": lambda: take(holders["deque"][0]),
        "partial": lambda: holders["partial"](),
    }
    ((x, y),) = data_of(4)
    for place, taken in takes.items():

        def loss_of(output: torch.Tensor, target: torch.Tensor, taken: Any = taken) -> torch.Tensor:
            return F.mse_loss(output, target) * taken()

        model = layers()
        with compiled_step(model, loss_of, capture=capture) as step, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with unchanged(model), pytest.raises(CaptureError) as refused:
                step(x, y)
        assert "MC2303" in str(refused.value), (place, str(refused.value))
    assert take(source) == take(untouched)


GENERATORS: dict[str, Callable[[], Any]] = {
    "Random": lambda: random.Random(0),
    "default_rng": lambda: np.random.default_rng(0),
    "RandomState": lambda: np.random.RandomState(0),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_in_a_closure_or_an_object_is_refused_and_put_back(name: str) -> None:
    generator, untouched = GENERATORS[name](), GENERATORS[name]()
    holder = Counter()
    holder.generator = generator  # type: ignore[attr-defined]
    ((x, y),) = data_of(4)
    for draw in (lambda: generator.random(), lambda: holder.generator.random()):  # type: ignore[attr-defined]

        def loss_of(output: torch.Tensor, target: torch.Tensor, draw: Any = draw) -> torch.Tensor:
            return F.mse_loss(output, target) * float(draw() if name != "RandomState" else generator.rand())

        words = r"MC2303: .* draws from"
        with compiled_step(layers(), loss_of, capture="autograd") as step, pytest.raises(CaptureError, match=words):
            step(x, y)
    assert float(getattr(generator, "rand", generator.random)()) == float(
        getattr(untouched, "rand", untouched.random)()
    )


@pytest.mark.parametrize("kind", ["tensor", "array", "batch norm"])
def test_shared_memory_that_forward_writes_is_refused_and_put_back(kind: str) -> None:
    tensor, array, norm = torch.zeros(2).double(), np.zeros(2), nn.BatchNorm1d(2).double()
    before = copy.deepcopy(norm.state_dict())

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if kind == "tensor":
            tensor.add_(1.0)
        elif kind == "array":
            array[0] += 1.0
        else:
            output = output + norm(output.detach())
        return F.mse_loss(output, target)

    ((x, y),) = data_of(6)
    words = r"MC2304: .* in place"
    with compiled_step(layers(), loss_of, capture="autograd") as step, pytest.raises(CaptureError, match=words):
        step(x, y)
    assert not tensor.any() and not array.any()
    torch.testing.assert_close(norm.state_dict(), before, rtol=0, atol=0)
