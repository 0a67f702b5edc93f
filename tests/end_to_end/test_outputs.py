"""What a step returns beside its loss is what the model returns on one device, in containers of the same kinds."""

import dataclasses
import functools
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import module_twins
import pytest
import torch
import torch.nn.functional as F
from references import unchanged
from selections import exhaustive, slow_but
from small_modules import Parts, module_of
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput
from twins import Twins

import mirrorc
from mirrorc import CaptureError, PerReplica
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.options.table import grouped
from mirrorc.runtime.execution.binding.step_outputs import StepOutputs
from mirrorc.user.loop_warnings import TrainedLoss

Pair = namedtuple("Pair", ["logits", "hidden"])


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    extras: dict[str, Any]
    name: str = "result"


class Holder:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits, self.unit = logits, "nats"


class Model(Parts):
    def __init__(self, shape_outputs: Callable[..., Any]) -> None:
        super().__init__(first=nn.Linear(4, 6), second=nn.Linear(6, 3), shape_outputs=shape_outputs)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.first(x).tanh()
        logits = self.second(hidden)
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return self.shape_outputs(logits, hidden, loss)


def batch(size: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return module_twins.batch(size, seed, features=4)


def make(shape_outputs: Callable[..., Any]) -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(shape_outputs).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer, devices: Any = 2, **options: Any) -> mirrorc.Step:
    options = {"backend": "eager", "return_outputs": True, "timeout": 60, **options}
    return mirrorc.compile(model, devices, optimizer=optimizer, **grouped(options))


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert not found.requires_grad and found.shape == expected.shape and found.dtype == expected.dtype
        torch.testing.assert_close(found, expected.detach(), rtol=tolerance, atol=tolerance)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_equal(found[key], value, tolerance)
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for own, value in zip(found, expected, strict=True):
            assert_equal(own, value, tolerance)
    elif dataclasses.is_dataclass(expected) or isinstance(expected, Holder):
        assert_equal(vars(found), vars(expected), tolerance)
    else:
        assert found == expected


def parts(value: Any, devices: int) -> list[Any]:
    assert isinstance(value, PerReplica) == (devices > 1)
    return list(value.values) if devices > 1 else [value]


def refuses(shape_outputs: Callable[..., Any], message: str, loss_fn: Any = None) -> None:
    model, optimizer = make(shape_outputs)
    x, target = batch(8)
    step = compiled(model, optimizer, loss_fn=loss_fn or loss_of_outputs)
    with step, unchanged(model), pytest.raises(CaptureError, match=message):
        step(x, target=target)


SHAPES: dict[str, Callable[..., Any]] = {
    "tensor": lambda logits, hidden, loss: logits,
    "tuple": lambda logits, hidden, loss: (logits, hidden.relu()),
    "named tuple": lambda logits, hidden, loss: Pair(logits, hidden),
    "dict": lambda logits, hidden, loss: {"logits": logits, "deep": {"hidden": [hidden, hidden * 2]}},
    "dataclass": lambda logits, hidden, loss: Result(logits, {"mean": logits.mean(), "rows": hidden.sum(1)}),
    "object": lambda logits, hidden, loss: Holder(logits),
    "twice": lambda logits, hidden, loss: (logits, [logits, logits.detach()], hidden.T.T),
    "integers": lambda logits, hidden, loss: (logits.argmax(1), logits > 0, logits.to(torch.bfloat16)),
}


def loss_of_outputs(outputs: Any, target: torch.Tensor) -> torch.Tensor:
    while not isinstance(outputs, torch.Tensor):
        outputs = (
            outputs["logits"]
            if isinstance(outputs, dict)
            else outputs.logits
            if hasattr(outputs, "logits")
            else outputs[0]
        )
    return F.cross_entropy(outputs.double() if outputs.is_floating_point() else outputs, target)


KINDS = [kind for kind in SHAPES if kind != "integers"]
EACH = [(kind, 1 + i % 4) for i, kind in enumerate(KINDS)]  # every kind, and every number of devices
USUAL = [*EACH, *[(kind, 1 + (i + 1) % 4) for i, kind in enumerate(KINDS)][::2]]
OTHERS = [(kind, devices) for kind in KINDS for devices in range(1, 5) if (kind, devices) not in USUAL]


@pytest.mark.parametrize(("kind", "devices"), [*USUAL, *exhaustive(*OTHERS)])
def test_outputs_are_those_of_one_device(kind: str, devices: int) -> None:
    options = {"devices": devices, "return_outputs": True, "tolerance": 1e-12}
    with Twins(make(SHAPES[kind])[0], loss_fn=loss_of_outputs, **options) as pair:
        for size, seed in ((8, 0), (9, 1), (8, 2)):
            x, target = batch(size, seed)
            expected = pair.twin(x)
            loss, outputs = pair.step(x, target=target)
            assert_equal(outputs, expected)
            assert loss.item() == pytest.approx(pair.plain(x, target=target).item(), rel=1e-12)
        pair.check()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_integers_truth_values_and_short_floats_along_the_batch(backend: str) -> None:
    model, optimizer = make(lambda logits, hidden, loss: (logits, *SHAPES["integers"](logits, hidden, loss)))
    x, target = batch(7)
    with torch.no_grad():
        expected = model(x)
    with compiled(model, optimizer, 3, loss_fn=loss_of_outputs, backend=backend) as step:
        assert_equal(step(x, target=target)[1], expected)


LOSSES: dict[str, Callable[..., Any]] = {
    "tuple": lambda logits, hidden, loss: (loss, logits),
    "dict": lambda logits, hidden, loss: {"logits": logits, "loss": loss},
    "model output": lambda logits, hidden, loss: SequenceClassifierOutput(loss=loss, logits=logits),
}


@pytest.mark.parametrize("kind", list(LOSSES))
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_model_may_return_its_loss_among_outputs(kind: str, devices: int) -> None:
    model, optimizer = make(LOSSES[kind])
    x, labels = batch(8)
    with torch.no_grad():
        expected = model(x, labels)
    with compiled(model, optimizer, devices) as step:
        loss, outputs = step(x, labels=labels)
        place: Any = 0 if kind == "tuple" else "loss"
        assert outputs[place] is loss and type(loss) is TrainedLoss
        values = outputs if kind == "tuple" else outputs.values()
        plain = [loss.clone() if value is loss else value for value in values]
        assert_equal(tuple(plain) if kind == "tuple" else type(outputs)(zip(outputs, plain, strict=True)), expected)


@pytest.mark.parametrize("kind", list(LOSSES))
def test_such_a_model_trains_without_outputs_too(kind: str) -> None:
    model, optimizer = make(LOSSES[kind])
    x, labels = batch(8)
    outputs = model(x, labels)
    expected = (outputs[0] if kind == "tuple" else outputs["loss"]).item()
    with compiled(model, optimizer, return_outputs=False) as step:
        assert step(x, labels=labels).item() == pytest.approx(expected)
        assert not any(list(calls_to(graph, ops.gather)) for graph in step.program.graphs())


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_what_loss_fn_returns_beside_the_loss(devices: int) -> None:
    model, optimizer = make(SHAPES["tensor"])

    def with_metrics(logits: torch.Tensor, target: torch.Tensor) -> Any:
        hits = (logits.argmax(1) == target).sum()
        return F.cross_entropy(logits, target), {
            "accuracy": hits / len(target),
            "hits": mirrorc.summed(hits),
            "per shard": hits,
            "size": len(target),
            "total": mirrorc.summed(logits.sum()),
        }

    x, target = batch(7)
    with torch.no_grad():
        logits = model(x)
        expected = with_metrics(logits, target)[1]
    sizes = [7 // devices + (i < 7 % devices) for i in range(devices)]
    hits = [(own.argmax(1) == t).sum().item() for own, t in zip(logits.split(sizes), target.split(sizes), strict=True)]
    with compiled(model, optimizer, devices, loss_fn=with_metrics) as step:
        loss, (outputs, metrics) = step(x, target=target)
        assert_equal(outputs, logits)
        torch.testing.assert_close(metrics["accuracy"], expected["accuracy"])
        assert metrics["hits"].item() == expected["hits"].item() and metrics["hits"].dtype == torch.int64
        torch.testing.assert_close(metrics["total"], expected["total"])
        assert [hit.item() for hit in parts(metrics["per shard"], devices)] == hits
        assert parts(metrics["size"], devices) == sizes
        assert loss.item() == pytest.approx(F.cross_entropy(logits, target).item())


def test_with_loss_reduction_sum_scalars_are_still_means() -> None:
    model, optimizer = make(lambda logits, hidden, loss: (logits, logits.mean()))
    x, target = batch(7)
    expected = model(x)[1].item()
    with compiled(
        model, optimizer, 3, loss_fn=lambda out, t: F.cross_entropy(out[0], t, reduction="sum"), loss_reduction="sum"
    ) as step:
        assert step(x, target=target)[1][1].item() == pytest.approx(expected)


@pytest.mark.parametrize("size", [3, 6, 7])
def test_what_happens_to_be_as_long_as_a_shard_is_no_batch(size: int) -> None:
    """A matrix of three rows beside shards of three examples."""
    model, optimizer = make(lambda logits, hidden, loss: (logits, logits.T @ logits, hidden[:2]))
    x, target = batch(size)
    with compiled(model, optimizer, 2, loss_fn=loss_of_outputs) as step:
        _, (logits, products, rows) = step(x, target=target)
        assert logits.shape == (size, 3)
        assert isinstance(products, PerReplica) and isinstance(rows, (PerReplica, torch.Tensor))
        first, second = logits.split([math.ceil(size / 2), size // 2])
        for own, part in zip(products.values, (first, second), strict=True):
            torch.testing.assert_close(own, part.T @ part)


def test_arguments_parameters_and_plain_values_are_returned_as_they_are() -> None:
    model = module_of(
        lambda self, x: {
            "x": x,
            "weight": self.weight,
            "y": x * self.weight,
            "n": 3,
            "none": None,
            "kind": x.dtype,
            "view": x[:, :2],
        },
        weight=nn.Parameter(torch.ones(4, dtype=torch.float64)),
    )
    x, _ = batch(5)
    with compiled(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=lambda out, target: (out["y"] - target).square().mean(),
    ) as step:
        _, outputs = step(x, target=torch.zeros_like(x))
        assert outputs["x"] is x and outputs["weight"] is model.weight
        assert (outputs["n"], outputs["none"], outputs["kind"]) == (3, None, torch.float64)
        torch.testing.assert_close(outputs["view"], x[:, :2])
        per_replica = PerReplica((x[:2], x[2:]))
        _, outputs = step(per_replica, target=PerReplica((torch.zeros(2, 4), torch.zeros(3, 4))))
        assert isinstance(outputs["x"], PerReplica) and outputs["y"].shape == (5, 4)


def test_outputs_of_a_step_stay_as_they_are_in_later_steps() -> None:
    model, optimizer = make(lambda logits, hidden, loss: (logits, hidden.mean(), hidden.sum(0)))
    with compiled(model, optimizer, 2, loss_fn=loss_of_outputs) as step:
        kept, copies = [], []
        for seed in range(4):
            x, target = batch(8, seed)
            outputs = step(x, target=target)[1]
            kept.append(outputs)
            copies.append((outputs[0].clone(), outputs[1].clone(), [own.clone() for own in outputs[2].values]))
            x.zero_()
        for outputs, (logits, mean, sums) in zip(kept, copies, strict=True):
            assert torch.equal(outputs[0], logits) and torch.equal(outputs[1], mean)
            assert all(map(torch.equal, outputs[2].values, sums))


def test_what_is_written_in_place_after_it_was_returned_shows_the_write() -> None:
    def loss_that_writes(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(logits, target)
        logits.detach().mul_(2)
        return loss

    model, optimizer = make(lambda logits, hidden, loss: logits)
    x, target = batch(6)
    with torch.no_grad():
        expected = model(x) * 2
    with compiled(model, optimizer, 2, loss_fn=loss_that_writes) as step:
        assert_equal(step(x, target=target)[1], expected)


@pytest.mark.fast
def test_a_model_of_batches_of_one_size_gives_what_may_lie_along_the_batch_apart() -> None:
    class Fixed(Parts):
        def __init__(self) -> None:
            super().__init__(linear=nn.Linear(4, 3).double())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) != 4:
                raise ValueError("four examples")
            return self.linear(x)

    model = Fixed()
    x, target = batch(8)
    expected = model(x[:4]).detach()
    with compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy) as step:
        with pytest.warns(UserWarning, match="MC3402: 'outputs' of Fixed may lie along the batch"):
            _, outputs = step(x, target=target)
        assert isinstance(outputs, PerReplica)
        assert_equal(outputs.values[0], expected)


class Opaque:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


HIDDEN: dict[str, Callable[..., Any]] = {
    "a closure": lambda h: lambda: h,
    "a partial function": lambda h: functools.partial(torch.add, h),
    "an iterator": lambda h: iter([h]),
    "the values of a dict": lambda h: {"h": h}.values(),
    "a set": lambda h: {h},
}


NUMBERS: dict[str, Callable[..., Any]] = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t.sum()),
    "numpy": lambda t: t.detach().sum().numpy(),
}


@pytest.mark.fast
@pytest.mark.parametrize("kind", [*HIDDEN, *NUMBERS])
def test_what_cannot_be_returned_is_refused(kind: str) -> None:
    """Tensors that cannot be found, and numbers and arrays that are made of tensors."""
    make_output = {**HIDDEN, **NUMBERS}[kind]
    refuses(lambda logits, hidden, loss: (logits, make_output(hidden)), "fix:  ")


def test_objects_are_looked_into_at_any_depth_and_made_anew_in_each_step() -> None:
    def deep(logits: torch.Tensor, hidden: torch.Tensor, loss: Any) -> Any:
        inner: Any = hidden
        for _ in range(8):
            inner = Opaque(inner)
        return {"logits": logits, "deep": inner, "sizes": Holder(len(hidden))}  # type: ignore[arg-type]

    model, optimizer = make(deep)
    x, target = batch(5)
    hidden = model.first(x).tanh().detach()
    with compiled(model, optimizer, loss_fn=loss_of_outputs) as step:
        _, outputs = step(x, target=target)
        inner = outputs["deep"]
        for _ in range(8):
            inner = inner.inner
        assert_equal(inner, hidden)
        assert parts(outputs["sizes"].logits, 2) == [3, 2]
        outputs["sizes"].unit = "changed"
        assert step(x, target=target)[1]["sizes"].unit == "nats"


@pytest.mark.parametrize("view", [lambda t: t.T, lambda t: t.mT, lambda t: t.data])
@pytest.mark.parametrize("of", ["argument", "target", "parameter"])
def test_views_that_no_operator_makes_are_refused_and_copies_of_them_given(of: str, view: Callable[..., Any]) -> None:
    class Viewing(Model):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            seen = {"argument": x, "parameter": self.first.weight, "target": x}[of]
            logits = self.second(self.first(x).tanh())
            return logits, self.shape_outputs(view(seen), None, None)

    x, target = batch(6)

    def loss_fn(outputs: Any, t: torch.Tensor) -> Any:
        return F.cross_entropy(outputs[0], t), (view(t[:, None]) if of == "target" else None)

    for is_copied in (False, True):
        torch.manual_seed(0)
        model = Viewing((lambda own, *_: own.clone()) if is_copied else (lambda own, *_: own)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.first.weight.detach().clone()
        with compiled(
            model, optimizer, loss_fn=loss_fn if of == "target" and not is_copied else loss_of_outputs
        ) as step:
            try:
                found = step(x, target=target)[1][1]
            except CaptureError as error:
                assert not is_copied and "a view (.T, .mT, .data)" in str(error)
                continue
            assert is_copied or torch.__version__ >= "2.14"  # which makes some of them by operators
            if of == "target":
                continue
            own = [view(before)] * 2 if of == "parameter" else [view(part) for part in x.split(3)]
            for value, expected in zip(
                parts(found, 2) if isinstance(found, PerReplica) else found.split(3), own, strict=True
            ):
                torch.testing.assert_close(value, expected)


def test_the_mark_of_a_sum_follows_conversions_and_nothing_else() -> None:
    model, optimizer = make(
        lambda logits, hidden, loss: (
            logits,
            mirrorc.summed(value=(logits > 0).sum()).float(),
            mirrorc.summed(hidden.sum()).detach(),
        )
    )
    x, target = batch(7)
    with torch.no_grad():
        _, count, total = model(x)
    with compiled(model, optimizer, 3, loss_fn=loss_of_outputs) as step:
        outputs = step(x, target=target)[1]
        torch.testing.assert_close(outputs[1], count)
        torch.testing.assert_close(outputs[2], total)
    halved = lambda logits, hidden, loss: (logits, mirrorc.summed(hidden.sum()) / 2)  # noqa: E731
    refuses(halved, r"'outputs\[1\]', .* is computed from a summed\(\) value")


def test_counts_made_of_the_size_of_a_shard_are_added_up() -> None:
    def with_count(logits: torch.Tensor, target: torch.Tensor) -> Any:
        return F.cross_entropy(logits, target), {"n": mirrorc.summed(torch.tensor(len(target)))}

    model, optimizer = make(SHAPES["tensor"])
    with compiled(model, optimizer, 2, loss_fn=with_count) as step:
        for size in (5, 8):
            x, target = batch(size)
            assert step(x, target=target)[1][1]["n"].item() == size


def test_outputs_that_cannot_be_put_together_say_that_the_step_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make(SHAPES["tensor"])
    x, target = batch(8)
    with compiled(model, optimizer, 2, loss_fn=F.cross_entropy) as step:
        step(x, target=target)

        def fail(*_: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(StepOutputs, "_together", fail)
            with pytest.raises(
                mirrorc.ExecutionError,
                match=r"MC2403: .*\n  why:  no memory\n  now:  the step is done and its update is made",
            ):
                step(x, target=target)
        assert step(x, target=target)[1].shape == (8, 3)


def test_what_depends_on_the_number_of_examples_is_refused() -> None:
    structure = r"'outputs.*another structure for another number of examples\n.*\n  fix"
    refuses(lambda logits, *_: list(logits), structure, lambda out, t: F.cross_entropy(torch.stack(out), t))
    summed = r"'outputs.rows' is marked by mirrorc.summed\(\), but its shape follows"
    refuses(lambda logits, hidden, loss: {"logits": logits, "rows": mirrorc.summed(hidden)}, summed)


@pytest.mark.fast
@pytest.mark.parametrize("backend", slow_but(["eager"], ["eager", "inductor"]))
def test_summed_is_the_identity_elsewhere(backend: str) -> None:
    x = torch.randn(3, requires_grad=True)
    mirrorc.summed(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3)) and torch.equal(mirrorc.summed(x), x)
    model, optimizer = make(lambda logits, hidden, loss: (logits, mirrorc.summed(hidden.sum())))
    a, target = batch(4)
    with compiled(model, optimizer, loss_fn=loss_of_outputs, return_outputs=False, backend=backend) as step:
        assert step(a, target=target).shape == ()


def test_a_skipped_step_gives_outputs_and_a_failed_one_leaves_nothing() -> None:
    model, optimizer = make(lambda logits, hidden, loss: logits)
    x, target = batch(8)
    with compiled(model, optimizer, loss_fn=loss_of_outputs, check_finite="skip") as step:
        step(x, target=target)
        bad = x.clone()
        bad[0, 0] = math.nan
        loss, outputs = step(bad, target=target)
        assert loss.isnan() and outputs[0].isnan().all() and not outputs[1:].isnan().any() and step.num_skipped == 1
        with pytest.raises(ValueError, match="disagree"):
            step(x, target=target[:4])
        assert step(x, target=target)[1].shape == (8, 3)


def test_the_printed_program_shows_what_is_gathered_and_a_saved_one_keeps_it(tmp_path: Any) -> None:
    model, optimizer = make(lambda logits, hidden, loss: {"logits": logits, "mean": hidden.mean()})
    x, target = batch(8)
    with compiled(model, optimizer, loss_fn=loss_of_outputs) as step:
        step(x, target=target)
        text = str(step.program)
        assert "outputs.logits" in text and "concatenated" in text and "averaged" in text
        step.program.save(tmp_path / "program.mirror")
        assert str(mirrorc.Program.load(tmp_path / "program.mirror")) == text
        assert step.memory().total > 0


def test_dropout_and_accuracy_agree_with_the_outputs() -> None:
    model = module_of(
        lambda self, x: F.dropout(self.linear(x), 0.5, training=self.training), linear=nn.Linear(4, 3).double()
    )
    x, target = batch(8)
    with compiled(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy) as step:
        for _ in range(3):
            loss, logits = step(x, target=target)
            assert (logits == 0).any()
            torch.testing.assert_close(loss, F.cross_entropy(logits, target))
