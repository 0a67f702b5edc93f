"""Outputs and evaluations of models that run as plain PyTorch."""

import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from branching import SGD, TOLERANCE, Net, batches
from references import unchanged
from small_modules import Parts
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc import CaptureError, ExecutionError

compiled = partial(compiled_step, loss_fn=F.cross_entropy, optimizer=SGD, capture="autograd", return_outputs=True)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("num_devices", "options"), [(3, {}), (2, {"microbatches": 2}), (1, {}), (2, {}), (2, {"backend": "inductor"})]
)
def test_outputs_are_those_of_the_whole_batch(num_devices: int, options: dict[str, Any]) -> None:
    model = Net()
    with compiled(model, devices=num_devices, **options) as step:
        for batch in batches(8, 7, 9):
            before = copy.deepcopy(model)
            loss, outputs = step(**batch)
            close(outputs, before(batch["x"]))
            close(loss, F.cross_entropy(before(batch["x"]), batch["target"]))


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_evaluations_run_forward_alone(num_devices: int) -> None:
    model, data = Net(), batches(8, 7)
    with compiled(model, devices=num_devices, return_outputs=False) as step:
        for batch in data:
            close(step.evaluate(**batch), F.cross_entropy(model(batch["x"]), batch["target"]))
            close(step.evaluate(batch["x"]), model(batch["x"]))
            step(**batch)
        model.eval()
        with torch.inference_mode():
            assert step.evaluate(**data[0]).shape == ()
    with compiled(model, devices=num_devices) as step:
        loss, outputs = step.evaluate(**data[0])
        close(outputs, model(data[0]["x"]))
        close(loss, F.cross_entropy(model(data[0]["x"]), data[0]["target"]))


@dataclass
class Found:
    loss: torch.Tensor
    logits: torch.Tensor
    more: dict[str, Any]


class Returns(Net):
    def __init__(self, also: Callable[..., Any] = lambda model, x, y: None) -> None:
        super().__init__()
        self.also = also
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Found:  # type: ignore[override]
        y = super().forward(x)
        self.seen.add_(len(x))
        right = y.argmax(1) == target
        return Found(
            F.cross_entropy(y, target),
            y,
            {
                "right": mirrorc.summed(right.sum()),
                "share": right.double().mean(),
                "target": target,
                "pair": (y, y[:, 0]),
                "name": "net",
                "weight": self.last.weight,
                "also": self.also(self, x, y),
            },
        )


def test_what_a_model_returns_is_put_together_again() -> None:
    model = Returns()
    with compiled(model, loss_fn=None) as step:
        for batch in batches(7, 6):
            before = copy.deepcopy(model)
            expected = before(**batch)
            loss, found = step(**batch)
            assert type(found) is Found and found.loss is loss and found.more["target"] is batch["target"]
            assert found.more["name"] == "net" and found.more["also"] is None
            assert found.more["weight"] is model.last.weight
            close(found.loss, expected.loss)
            close(found.logits, expected.logits)
            assert found.more["pair"][0] is found.logits
            close(found.more["pair"][1], expected.logits[:, 0])
            assert found.more["right"] == expected.more["right"]
            close(found.more["share"], expected.more["share"])
        assert step.evaluate(**batch)[1].more["right"] >= 0


REFUSED = [
    (lambda model, x, y: model.last, r"returns a module or a method of one.*'outputs.more.also'"),
    (lambda model, x, y: model.parameters, r"returns a module or a method of one"),
    (lambda model, x, y: lambda: y, r"returns a function that holds other values, as 'outputs.more.also'"),
    (lambda model, x, y: iter([1]), r"returns a list_iterator, as 'outputs.more.also'"),
    (
        lambda model, x, y: mirrorc.summed(y.sum()) * 2,
        r"MC2402: something is computed of a value that is marked by mirrorc.summed",
    ),
    (lambda model, x, y: y.sum().item(), r"'outputs.more.also', which .* differs between two shards of equal shape"),
]


@pytest.mark.parametrize(("also", "words"), REFUSED)
def test_what_cannot_be_put_together_is_refused(also: Callable[..., Any], words: str) -> None:
    model = Returns(also)
    with compiled(model, loss_fn=None) as step, unchanged(model), pytest.raises(CaptureError, match=f"(?s){words}"):
        step(**batches(6)[0])
    with compiled(model, loss_fn=None, return_outputs=False) as step:
        step(**batches(6)[0])


LATER = [
    lambda model, x, y: y.sum().item(),
    lambda model, x, y: y[: int(model.seen) % 5 + 1],
    lambda model, x, y: [y] * (int(model.seen) % 5),
    lambda model, x, y: y.float() if int(model.seen) % 2 else y,
]


@pytest.mark.fast
@pytest.mark.parametrize("also", LATER)
def test_outputs_of_another_structure_fail_before_anything_is_updated(also: Callable[..., Any]) -> None:
    model, (batch,) = Returns(also), batches(3)
    words = r"something else as 'outputs.more.also(?s:.*)No parameter was changed"
    with compiled(model, devices=1, loss_fn=None) as step:
        step(**batch)
        with unchanged(model), pytest.raises(ExecutionError, match=f"(?s){words}"):
            step(**batch)


@pytest.mark.fast
def test_an_output_of_which_nobody_knows_whether_it_lies_along_the_batch() -> None:
    class Takes(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 4:
                raise ValueError("not four")
            return super().forward(x)

    (batch,) = batches(6)
    with compiled(Takes()) as step, pytest.warns(UserWarning, match="may lie along the batch"):
        _, outputs = step(**batch)
    assert isinstance(outputs, mirrorc.PerReplica)


@pytest.mark.fast
def test_an_output_whose_shape_depends_on_values_makes_it_run_as_plain_pytorch() -> None:
    def loss_and_counts(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.cross_entropy(logits, target), torch.bincount(target, minlength=9)

    (batch,) = batches(8)
    with compiled(Net(), loss_fn=loss_and_counts, capture="auto") as step, pytest.warns(UserWarning, match="MC2701"):
        _, (_, counts) = step(**batch)
    assert torch.equal(sum(counts.values), torch.bincount(batch["target"], minlength=9))


# Python values that forward returns without looking at them are those of each call.


SETTINGS = {"mode": "first"}
NAMES: list[str] = []


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    name: str
    extras: Any


class Passing(Parts):
    def __init__(self) -> None:
        super().__init__(linear=nn.Linear(3, 2), units={"loss": "nats"})

    def forward(self, x: torch.Tensor, name: Any = "a") -> Result:
        extras = Extras()
        extras.mode, extras.units = SETTINGS["mode"], [self.units["loss"]]
        return Result(self.linear(x).square().mean(), name, {"extras": extras})


class Extras:
    mode: str
    units: list[str]


def rename(model: Passing) -> dict[str, Any]:
    return {"name": "b"}


def change_the_units(model: Passing) -> dict[str, Any]:
    model.units["loss"] = "bits"
    return {}


def change_the_mode(model: Passing) -> dict[str, Any]:
    SETTINGS["mode"] = "second"
    return {}


@pytest.mark.fast
@pytest.mark.parametrize("change", [rename, change_the_units, change_the_mode])
def test_values_that_forward_only_returns_are_those_of_each_call(
    change: Callable[[Passing], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "mode", "first")
    model, x = Passing(), torch.randn(4, 3)
    with compiled_step(model, return_outputs=True) as step:
        for call in ({}, change(model)):
            found, expected = step(x, **call)[1], model(x, **call)
            assert found.name == expected.name
            assert vars(found.extras["extras"]) == vars(expected.extras["extras"])


@pytest.mark.fast
def test_values_that_forward_only_keeps_are_no_reason_to_compile_anew() -> None:
    class Keeping(Passing):
        def forward(self, x: torch.Tensor, name: Any = "a") -> torch.Tensor:  # type: ignore[override]
            NAMES.append(name)
            return self.linear(x).square().mean()

    model = Keeping()
    with compiled_step(model) as step, pytest.warns(UserWarning, match="NAMES"):
        programs = set()
        for name in ("a", "b"):
            step(torch.ones(4, 3), name=name)
            programs.add(id(step.programs[-1]))
    assert len(programs) == 1


# Strings, numbers and lists of them in a batch: a step is compiled anew for what Python reads of them, and for nothing else.


Body = Callable[[torch.Tensor, Any], Any]


class Reader(Parts):
    def __init__(self, body: Body) -> None:
        super().__init__(layer=nn.Linear(3, 2), body=body)

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


class Naming(Parts):
    def __init__(self) -> None:
        super().__init__(layer=nn.Linear(3, 2))

    def forward(self, x: torch.Tensor, *, names: list[str], scale: float = 1.0, **more: Any) -> dict[str, Any]:
        return {"y": self.layer(x) * scale, "names": names, **more}


@pytest.mark.fast
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


@pytest.mark.fast
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


def test_the_warning_about_many_programs_names_only_what_is_read() -> None:
    model = Reader(lambda x, v: float(len(v["scale"])))
    with compiled_step(model, mean) as step, pytest.warns(UserWarning) as caught:
        for i in range(9):
            step(X.float(), {"scale": "a" * i, "path": f"{i}.png"}, target=torch.zeros(4, 2))
    (message,) = [str(warning.message) for warning in caught if "compiled" in str(warning.message)]
    assert "each new value of 'given.scale' ('', 'a', 'aa', ...) is compiled anew" in message
