"""Strings, numbers and lists of them in a batch: a step is compiled anew for what Python reads of them, and for nothing else."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from twins import Twins, compiled_step

import mirrorc
from mirrorc.errors import CaptureError

Body = Callable[[torch.Tensor, Any], Any]


class Reader(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.body = body

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        return self.layer(x) * self.body(x, given)


class Pair(NamedTuple):
    image: torch.Tensor
    name: str


@dataclasses.dataclass
class Record:
    image: torch.Tensor
    names: list[str]


def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def twins(model: nn.Module, loss_fn: Any = mean) -> Twins:
    return Twins(model.double(), partial(torch.optim.SGD, lr=0.01), loss_fn, tolerance=1e-12)


X = torch.ones(4, 3, dtype=torch.float64)
CASES: dict[str, tuple[Body, list[Any], int]] = {
    "a string that nothing reads": (lambda x, v: 1.0, ["a", "b", "", "a"], 1),
    "names that nothing reads": (lambda x, v: 1.0, [["a", "b"], ["c", "d"], [], ["a", "b", "c"], ("a", "b")], 1),
    "numbers and None that nothing reads": (lambda x, v: 1.0, [1, 2.5, None, True, "a", [1, [2, None]], b"c"], 1),
    "a string that is compared": (lambda x, v: 2.0 if v == "a" else 3.0, ["a", "b", "a", "b", "c"], 3),
    "one of the names": (lambda x, v: 2.0 if v[0] == "a" else 3.0, [["a", "b"], ["a", "c"], ["d", "c"], ["a", "e"]], 2),
    "the number of names": (lambda x, v: len(v), [["a"], ["b"], ["a", "c"], ["d"], ["e", "f"]], 2),
    "a number": (lambda x, v: v, [1, 2, 1.0, 2.0, True, 1, 0.0, -0.5], 4),
    "the sign of a zero": (lambda x, v: math.copysign(2.0, v), [0.0, -0.0, 0.0, -0.0], 2),
    "zeros in a list that becomes shorter": (lambda x, v: v[0] + 1.0 if v else 5.0, [[0.0], [], [-0.0], [0.0]], 3),
    "not a number": (lambda x, v: 1.0 if v == v else 2.0, [math.nan, 1.0, math.nan, float("nan")], 2),
    "None or not": (lambda x, v: 2.0 if v is None else 3.0, [None, "a", None, False], 3),
    "a flag": (lambda x, v: 2.0 if v else 3.0, [True, False, True, False], 2),
    # torch 2.11 guards the value as well
    "its type": (
        lambda x, v: 2.0 if isinstance(v, str) else 3.0,
        ["a", "b", 1, "c"],
        2 if torch.__version__ >= "2.12" else 4,
    ),
    "its text": (lambda x, v: float(len(f"{v}")), ["a", "bb", "a"], 2),
    "a key": (lambda x, v: {"a": 1.0, "b": 2.0}[v], ["a", "b", "a"], 2),
    "a member": (lambda x, v: 2.0 if "b" in v else 3.0, [["a", "b"], ["a", "c"], ["a", "b"]], 2),
    "dims of an operator": (lambda x, v: torch.ones(2, 3).sum(dim=v).mean().double(), [0, 1, (0, 1), [0, 1], 0], 4),
    "a tensor of them": (lambda x, v: torch.tensor(v, dtype=x.dtype).sum(), [[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]], 2),
    "a dict with names": (
        lambda x, v: v["x"].mean() * len(v["mode"]),
        [
            {"x": X, "path": ["a"], "mode": "b"},
            {"x": X, "path": ["c", "d"], "mode": "b"},
            {"x": X, "path": [], "mode": "cc"},
        ],
        2,
    ),
    "what a dict has": (lambda x, v: len(v), [{"a": "b"}, {"a": "c"}, {"a": "c", "d": None}], 2),
    "a dict of one's own": (lambda x, v: len(v.pop("a")), [{"a": "b", "c": 1}, {"a": "b", "c": 2}], 1),
    "classes that hold names": (
        lambda x, v: v[0].image.mean() + v[1].image.mean(),
        [(Pair(X, "a"), Record(X, ["b"])), (Pair(X, "c"), Record(X, ["d"]))],
        1,
    ),
    "names that every replica gets": (lambda x, v: 1.0, [mirrorc.replicated(["a"]), mirrorc.replicated(["b"])], 1),
    "names of replicas": (
        lambda x, v: v["x"].mean(),
        [mirrorc.PerReplica([{"x": X[:2], "n": "a"}] * 2), mirrorc.PerReplica([{"x": X[:2], "n": "b"}] * 2)],
        2,
    ),
}


def plain(given: Any) -> Any:
    if isinstance(given, mirrorc.PerReplica):
        return {"x": torch.cat([value["x"] for value in given.values]), "n": given.values[0]["n"]}
    return getattr(given, "value", given)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_only_what_is_read_compiles_anew(name: str) -> None:
    body, values, expected = CASES[name]
    torch.manual_seed(0)
    target = torch.zeros(4, 2, dtype=torch.float64)
    programs = []
    with twins(Reader(body)) as pair:
        for given in values:
            loss = pair.plain(X, copy.copy(plain(given)), target=target).item()
            assert pair.step(X, given, target=target).item() == pytest.approx(loss, rel=1e-12), f"{given}"
            programs.append(pair.step.programs[-1])
    assert len({id(program) for program in programs}) == expected


class NamedLoss:
    def __call__(self, output: dict[str, Any], target: dict[str, Any]) -> torch.Tensor:
        return mean(output["y"], target["y"]) * len(target["kinds"][0])


class Naming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, *, names: list[str], scale: float = 1.0, **more: Any) -> dict[str, Any]:
        return {"y": self.layer(x) * scale, "names": names, **more}


def test_names_in_keywords_in_the_target_and_in_the_output() -> None:
    calls: list[tuple[dict[str, Any], list[str]]] = [
        ({"names": ["a", "b"]}, ["c"]),
        ({"names": ["d", "e", "f"], "split": "train"}, ["c"]),  # one more keyword
        ({"names": [], "split": "test"}, ["c"]),
        ({"names": ["d"], "split": "train"}, ["hh"]),  # the loss reads it
        ({"names": ["a"], "scale": 2.0}, ["c"]),
        ({"names": ["b"], "scale": 3.0}, ["c"]),  # forward reads it
        ({"names": ["c"], "scale": 2.0}, ["c"]),
        ({"names": ["g", "h"]}, ["c"]),
    ]
    programs = []
    with twins(Naming(), NamedLoss()) as pair:
        for keywords, kinds in calls:
            pair.train(X, target={"y": torch.zeros(4, 2, dtype=torch.float64), "kinds": kinds}, **keywords)
            programs.append(pair.step.programs[-1])
    assert [programs.index(program) for program in programs] == [0, 1, 1, 3, 4, 5, 5, 0]


def test_what_forward_changes_in_a_list_is_said_with_its_name() -> None:
    names, target = ["a", "b"], torch.zeros(4, 2)
    taking, adding = Reader(lambda x, v: len(v.pop())), Reader(lambda x, v: v.append("b") or 1.0)
    with (
        compiled_step(taking, mean, capture="dynamo") as step,
        pytest.raises(CaptureError, match="of Reader reads and changes given"),
    ):
        step(X.float(), names, target=target)
    with (
        compiled_step(adding, mean) as step,
        pytest.warns(UserWarning, match="Reader changes given in forward or loss"),
    ):
        step(X.float(), names, target=target)
    assert names == ["a", "b"]


@pytest.mark.slow
def test_the_warning_about_many_programs_names_only_what_is_read() -> None:
    model = Reader(lambda x, v: float(len(v["scale"])))
    with compiled_step(model, mean) as step, pytest.warns(UserWarning) as caught:
        for i in range(9):
            step(X.float(), {"scale": "a" * i, "path": f"{i}.png"}, target=torch.zeros(4, 2))
    (message,) = [str(warning.message) for warning in caught if "compiled" in str(warning.message)]
    assert "each new value of 'given.scale' ('', 'a', 'aa', ...) is compiled anew" in message
