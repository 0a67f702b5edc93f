"""What tells the bits of the optimizers' state: values of objects and containers, not their addresses or shortened texts."""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch

from mirrorc.runtime.workers.protocol.checksums import checksums_of_state


class Plain:
    """An object without a text of its own, which holds what it is in."""

    def __init__(self, value: Any) -> None:
        self.value, self.itself, self.function = value, self, lambda: value


@dataclass
class Record:
    value: Any
    names: set[str] = field(default_factory=lambda: {"one", "two", "three"})


def generator(seed: float) -> torch.Generator:
    return torch.Generator().manual_seed(int(seed))


def long_tensor(number: float) -> torch.Tensor:
    tensor = torch.zeros(3000)
    tensor[1500] = number
    return tensor


def told(value: Any) -> dict[str, str]:
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter]["kept"] = value
    return checksums_of_state([optimizer], [("weight", parameter)])


MAKERS: dict[str, Any] = {
    "number": lambda number: number,
    "list": lambda number: [None, long_tensor(number)],
    "dict": lambda number: {"a": (1, long_tensor(number))},
    "object": lambda number: Plain(long_tensor(number)),
    "dataclass": lambda number: Record(long_tensor(number)),
    "array": lambda number: long_tensor(number).numpy(),
    "scalar": numpy.float64,
    "generator": generator,
    "set": lambda number: {"one", "two", f"{number}"},
    "sparse": lambda number: torch.sparse_coo_tensor([[1, 4]], [1.0, number], (9,)),
    "nested": lambda number: [Plain({"deep": [Record(number)]})],
}


@pytest.mark.parametrize("kind", MAKERS)
def test_equal_values_are_told_alike_and_others_are_not(kind: str) -> None:
    make = MAKERS[kind]
    kept = [make(1.0), make(1.0)]  # both live, so that addresses differ
    assert told(kept[0]) == told(kept[1])
    assert told(kept[0]) != told(make(2.0))


def test_an_entry_says_where_in_the_state_it_is() -> None:
    facts = told(Plain([long_tensor(1.0)]))
    assert facts["kept.value[0] of weight"].startswith("checksum ")
    assert "0x" not in "".join(facts.values())


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def test_what_is_reached_by_many_paths_is_told_once_and_slots_and_arrays_of_objects_by_what_they_hold() -> None:
    chain: Any = Slotted(1)
    for _ in range(60):  # which has 2 ** 60 paths
        chain = [chain, chain]
    assert told(chain) == told(copy.deepcopy(chain))
    assert len(told(chain)) < 200
    for one, other in ((Slotted(1), Slotted(2)), (numpy.array([1, "a"], object), numpy.array([2, "a"], object))):
        same = copy.deepcopy(one)
        assert told(one) == told(same)
        assert told(one) != told(other)
