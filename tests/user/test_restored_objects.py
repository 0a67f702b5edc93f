"""A deep restore, by `mirrorc.check_loss`, of the objects that forward and loss change, and its limits."""

import copy
import itertools
import random
from array import array
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mirrorc

steps = {"done": 0}


def grow(value: Any) -> None:
    changes: list[tuple[type, Callable[[Any], object]]] = [
        (deque, lambda own: own.append(2)),
        (array, lambda own: own.append(2)),
        (bytearray, lambda own: own.append(2)),
        (UserList, lambda own: own.append(2)),
        (UserDict, lambda own: own.update(k=2)),
        (list, lambda own: own.append(2)),
        (dict, lambda own: own.update(k=own.get("k", 0) + 1)),
        (set, lambda own: own.add(2)),
        (torch.Generator, lambda own: torch.rand(1, generator=own)),
        (torch.Tensor, lambda own: own.data.add_(1)),
        (np.ndarray, lambda own: own.__iadd__(1)),
        (random.Random, lambda own: own.random()),
        (np.random.Generator, lambda own: own.random()),
        (np.random.RandomState, lambda own: own.rand()),
        (MoreCounts, lambda own: own.grow()),
        (object, lambda own: setattr(own, "k", getattr(own, "k", 0) + 1)),
    ]
    next(change for kind, change in changes if isinstance(value, kind))(value)


class Log(list[Any]):
    pass


class Schedule:
    def __init__(self) -> None:
        self.k = 0


@dataclass(slots=True)
class Counts:
    """An object whose attributes are in slots, one of which has no value at first."""

    k: int = 0


class MoreCounts(Counts):
    """One whose attributes are in slots of two classes and in a dict."""

    __slots__ = ("__dict__", "__hidden", "late")

    def __init__(self) -> None:
        super().__init__()
        self.__hidden, self.other = [0], 0

    def grow(self) -> None:
        self.__hidden.append(1)
        self.late = self.__hidden = [2]
        self.other += 1
        self.k += 1

    def __repr__(self) -> str:
        return f"{self.k} {self.__hidden} {getattr(self, 'late', None)}"


def mutable_objects() -> list[Any]:
    return [
        *([1], {"k": 1}, {1}, deque([1], maxlen=3), OrderedDict(k=1), defaultdict(int, k=1), Counter(k=1), Log([1])),
        *(SimpleNamespace(k=1), Schedule(), torch.Generator().manual_seed(0), torch.ones(2), np.ones(2)),
        *(random.Random(0), np.random.default_rng(0), np.random.RandomState(0)),
        *(Counts(), MoreCounts(), UserDict(k=1), UserList([1]), bytearray(b"1"), array("d", [1.0])),
    ]


def text_of(value: Any) -> str:
    if isinstance(value, torch.Generator):
        return str(value.get_state().tolist())
    if isinstance(value, random.Random | np.random.RandomState):
        return repr(value.getstate() if isinstance(value, random.Random) else value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    return f"{value!r} {getattr(value, '__dict__', None)!r}"


class Net(nn.Module):
    def __init__(self, does: Callable[[], object] = lambda: None, **table: Any) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(5, 4, **table), nn.Linear(4, 1)
        self.does = does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.does()
        return self.last(self.table(x))


class CallableLoss:
    def __init__(self, does: Callable[[], object]) -> None:
        self.does, self.num_calls = does, 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.does()
        self.num_calls += 1
        return F.mse_loss(output, target) * min(1.0, self.num_calls / 10)


def check(model: nn.Module, loss_fn: Any = F.mse_loss, **more: Any) -> mirrorc.LossCheck:
    x, y = torch.tensor([0, 1, 2, 3, 4, 0]), torch.linspace(-1, 1, 6)[:, None]
    return mirrorc.check_loss(model, x, target=y, loss_fn=loss_fn, **more)


def ways_to_hold(value: Any) -> list[tuple[nn.Module, Any]]:
    """Models and losses that change a value, each by another way to it."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        grow(value)
        return F.mse_loss(output, target)

    def given(value: Any, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        grow(value)
        return F.mse_loss(output, target)

    model, nested, hooked = Net(), Net(), Net()
    model.held, nested.held = value, {"a": ({"b": [value]},)}
    model.does, nested.does = lambda: grow(model.held), lambda: grow(nested.held["a"][0]["b"][0])
    hooked.last.register_forward_hook(lambda *_: grow(value))
    losses = [CallableLoss(partial(grow, value)), loss_fn, partial(given, value), CallableLoss(lambda: None).__call__]
    return [(model, F.mse_loss), (nested, F.mse_loss), (hooked, F.mse_loss), *((Net(), loss) for loss in losses)]


@pytest.mark.slow
def test_what_forward_and_loss_change_is_put_back() -> None:
    for i, what in enumerate(mutable_objects()):
        for way in range(7):
            value = mutable_objects()[i]
            before = text_of(value)
            model, loss_fn = ways_to_hold(value)[way]
            found = check(model, loss_fn)
            assert text_of(value) == before, f"{type(what).__name__}, held in way {way}"
            assert found.same, found
            assert getattr(loss_fn, "num_calls", 0) == 0


def test_rebound_variables_of_closures_are_put_back() -> None:
    num_calls = 0

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return F.mse_loss(output, target) * num_calls

    assert check(Net(), loss_fn).same and num_calls == 0


def test_parameters_that_forward_writes_and_batches_are_put_back() -> None:
    model = Net(max_norm=0.1)
    values = copy.deepcopy(model.state_dict())
    assert check(model).same
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())

    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2))

    x = torch.ones(6, 3)
    assert mirrorc.check_loss(Doubling(3, 1), x, target=torch.zeros(6, 1), loss_fn=F.mse_loss).same
    assert torch.equal(x, torch.ones(6, 3))


def test_globals_are_put_back() -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        steps["done"] += 1
        return F.mse_loss(output, target) * steps["done"]

    assert check(Net(), loss_fn).same and steps == {"done": 0}


def test_an_iterator_is_named_as_a_reason() -> None:
    numbers = itertools.count(1)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * next(numbers)

    found = check(Net(), loss_fn)
    assert not found.same and "the loss of the same batch changes from call to call" in str(found)
    assert "an iterator or a queue" in str(found) and "compares or normalizes" not in str(found)


def test_a_shard_that_has_a_mean_of_nothing_is_named() -> None:
    def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target).square() * (target > 0)).sum() / (target > 0).sum()

    found = check(Net(), masked)
    assert not found.same and "the loss of shard 0 is not a number, as a mean of nothing is" in str(found)
    assert "compares or normalizes" not in str(found)


@pytest.mark.parametrize("raises", [False, True])
def test_a_failing_loss_leaves_no_trace(raises: bool) -> None:
    log: list[int] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        log.append(1)
        if raises:
            raise RuntimeError("of the user's")
        return (output - output.mean()).square().mean()

    if raises:
        with pytest.raises(RuntimeError, match="of the user's"):
            check(Net(), loss_fn)
    else:
        assert not check(Net(), loss_fn).same
    assert log == []


@pytest.mark.parametrize("raises", [False, True])
def test_tensors_and_arrays_of_another_shape_are_put_back(raises: bool) -> None:
    table = torch.arange(6.0)
    tensors = {
        "grown": torch.arange(3.0),
        "shrunk": torch.arange(3.0),
        "part": table[1:3],
        "turned": torch.arange(6.0).reshape(2, 3).t(),
        "elsewhere": torch.arange(3.0),
        "of another kind": torch.arange(3.0),
        "repeated": torch.ones(2, 1).expand(2, 3),
    }
    before = {name: (tensor.clone(), tensor.stride()) for name, tensor in tensors.items()}
    array = np.arange(3.0)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        tensors["grown"].resize_(len(tensors["grown"]) + 100)
        tensors["shrunk"].resize_(1).zero_()
        tensors["part"].resize_(50)
        tensors["turned"].t_().add_(1)
        tensors["elsewhere"].set_(torch.ones(2))
        tensors["of another kind"].data = torch.ones(3, dtype=torch.float64)
        tensors["repeated"][:, :1].add_(1)
        array.resize(7, refcheck=False)
        if raises:
            raise ValueError("of the user's")
        return F.mse_loss(output, target) * array.size

    if raises:
        with pytest.raises(ValueError, match="of the user's"):
            check(Net(), loss_fn)
    else:
        assert check(Net(), loss_fn).same
    for name, tensor in tensors.items():
        value, strides = before[name]
        assert tensor.dtype == value.dtype and tensor.stride() == strides and torch.equal(tensor, value), name
    assert array.tolist() == [0.0, 1.0, 2.0]
    table.add_(1)
    assert tensors["part"].tolist() == [2.0, 3.0]  # it is still a part of its table


@pytest.mark.parametrize("raises", [False, True])
def test_what_cannot_be_put_back_leaves_the_rest_put_back_and_errors_as_they_are(raises: bool) -> None:
    streams = [torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)]
    before = text_of(streams[0])
    locked = np.ones(2)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for stream in held[::2]:
            torch.rand(1, generator=stream)
        locked[0] = 2.0
        locked.flags.writeable = False
        if raises:
            raise KeyError("of the user's")
        return F.mse_loss(output, target)

    held: list[Any] = [streams[0], locked, streams[1]]  # one comes before what cannot be put back, and one after it
    with pytest.raises(KeyError if raises else ValueError, match="of the user's" if raises else "read-only") as caught:
        check(Net(), loss_fn)
    assert [text_of(stream) for stream in streams] == [before] * 2
    notes = getattr(caught.value, "__notes__", [])
    assert ("could not be put back" in str(notes) and "read-only" in str(notes)) == raises


@pytest.mark.slow
def test_held_tensors_that_are_no_numbers_in_memory_are_left_alone() -> None:
    model = Net()
    model.held = [torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]
    assert check(model).same
