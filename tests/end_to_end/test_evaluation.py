"""`step.evaluate` gives what the model gives on one device without gradients, and changes nothing that training goes on from."""

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import module_twins
import pytest
import selections
import torch
import torch.nn.functional as F
from asserting import Asserting
from references import assert_same_parameters
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput
from twins import Twins, compiled_step

import mirrorc
from mirrorc import CaptureError, ExecutionError, PerReplica
from mirrorc.ir.program import Program, Stage
from mirrorc.verifier.verifier import verify

COPIES = {"disable": ("share-parameters",)}
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.again = nn.Linear(6, 6)
        self.back = nn.Linear(6, 6)
        self.back.weight = self.again.weight
        self.again.bias.requires_grad_(False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)).tanh()
        return self.last(self.drop(self.back(self.again(hidden))))


class Labelled(nn.Module):
    def __init__(self, shape_outputs: Callable[..., Any]) -> None:
        super().__init__()
        self.last, self.shape_outputs = nn.Linear(4, 3), shape_outputs

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.last(x)
        return self.shape_outputs(logits, F.cross_entropy(logits, labels) if labels is not None else None)


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    loss: torch.Tensor | None


def batch(size: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return module_twins.batch(size, seed, features=4)


def make(make_model: Callable[[], nn.Module] = Tied) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make_model().double().eval()
    return model, torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer, devices: int = 2, **options: Any) -> mirrorc.Step:
    options = {"timeout": 60, "loss_fn": F.cross_entropy, **options}
    return compiled_step(model, devices=devices, optimizer=optimizer, **options)


def loss_only(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return F.cross_entropy(model(x), target)


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, **TOLERANCE)


class Evaluated(Twins):
    """Tied twins in evaluation mode."""

    def __init__(self, **options: Any) -> None:
        def trainable(model: nn.Module) -> list[nn.Parameter]:
            return [p for p in model.parameters() if p.requires_grad]

        adamw = partial(torch.optim.AdamW, lr=0.05)
        super().__init__(make()[0], adamw, F.cross_entropy, select=trainable, **options)
        self.x, self.target = batch()

    def both_trained(self) -> None:
        self.train(self.x, target=self.target)

    def evaluated(self) -> None:
        assert_close(self.step.evaluate(self.x, target=self.target), loss_only(self.twin, self.x, self.target))
        assert_close(self.step.evaluate(self.x), self.twin(self.x).detach())


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("num_devices", "reduction", "backend"),
    [
        (3, "mean", "eager"),
        (1, "mean", "eager"),
        (4, "sum", "eager"),
        (3, "sum", "inductor"),
        *selections.exhaustive((2, "sum", "eager"), (4, "mean", "eager"), (2, "sum", "inductor")),
    ],
)
def test_an_evaluation_is_that_of_one_device(num_devices: int, reduction: str, backend: str) -> None:
    model, optimizer = make()
    reference, before = copy.deepcopy(model), state_of(model)
    stream = torch.get_rng_state()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return F.cross_entropy(output, target, reduction=reduction), {
            "right": (output.argmax(1) == target).double().mean()
        }

    x, target = batch(7)
    with compiled(
        model, optimizer, num_devices, loss_fn=loss_fn, loss_reduction=reduction, backend=backend, return_outputs=True
    ) as step:
        loss, (logits, metrics) = step.evaluate(x, target=target)
        alone = step.evaluate(x)
        fewer = step.evaluate(x[:2]) if num_devices == 3 else alone[:2]  # than devices
    with torch.no_grad():
        expected = reference(x)
        assert_close(fewer, expected[:2])
        assert_close(loss, loss_fn(expected, target)[0])
        assert_close(logits, expected)
        assert_close(alone, expected)
        assert_close(metrics["right"], (expected.argmax(1) == target).double().mean())
    assert not loss.requires_grad and loss.shape == () and not logits.requires_grad
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("options", [{}, COPIES], ids=["shared", "copies"])
def test_training_goes_on_as_if_nothing_were_evaluated(options: dict[str, Any]) -> None:
    """Steps in train mode and evaluations take turns: the same programs run in the same memory, and the random stream goes on."""
    model, optimizer = make()
    other, other_optimizer = make()
    drawn: list[torch.Tensor] = []
    with compiled(model, optimizer, **options) as step, compiled(other, other_optimizer, **options) as plain:
        for seed in range(4):
            x, target = batch(8, seed=seed)
            for each in (model, other):
                each.train()
            torch.manual_seed(seed)
            loss, drawn = step(x, target=target), [torch.rand(1)]
            layout = step._state.layout
            model.eval()
            with torch.no_grad():
                expected = model(x)
            assert_close(step.evaluate(x, target=target), loss_only(model, x, target))
            assert_close(step.evaluate(x), expected)
            drawn.append(torch.rand(1))
            torch.manual_seed(seed)
            assert torch.equal(loss, plain(x, target=target))
            assert drawn == [torch.rand(1), torch.rand(1)]
            assert step._state.layout == layout
            assert all(
                torch.equal(a, b) for a, b in zip(state_of(model).values(), state_of(other).values(), strict=True)
            )
        assert step._specializer.num_programs == 3
        assert step.explain().num_steps == 3  # without the first one


@pytest.mark.parametrize("num_devices", [1, 2])
def test_in_train_mode_statistics_are_written_and_dropout_draws(num_devices: int) -> None:
    """As under ``torch.no_grad()``: each shard has statistics of its own, as in a training step."""
    model, optimizer = make(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)))
    model.train()
    x, _ = batch(6)
    means = [copy.deepcopy(model) for _ in range(num_devices)]
    with torch.no_grad():
        for each, shard in zip(means, x.chunk(num_devices), strict=True):
            each(shard)
    with compiled(model, optimizer, num_devices) as step:
        torch.manual_seed(3)
        first = step.evaluate(x)
        drawn = torch.rand(1)
        expected = sum(each[1].running_mean for each in means) / num_devices
        assert_close(model[1].running_mean, expected)
        assert int(model[1].num_batches_tracked) == 1
        torch.manual_seed(3)
        assert torch.equal(step.evaluate(x), first)
        torch.manual_seed(3)
        torch.randint(2**62, (), dtype=torch.int64)
        assert torch.equal(torch.rand(1), drawn)  # one draw
        model.eval()
        assert not torch.allclose(step.evaluate(x), first)
    assert all(p.grad is None for p in model.parameters())


def averaged_in_place(model: nn.Module, _: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def averaged_in_other_memory(model: nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


def loaded(model: nn.Module, _: Any) -> None:
    model.load_state_dict({name: value * 1.1 for name, value in model.state_dict().items()})


def own_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step of the user's, and another state of the optimizer."""
    x, target = batch()
    F.cross_entropy(model(x), target).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for entry in optimizer.state.values():
        entry["exp_avg"].mul_(2.0)


@pytest.mark.parametrize("options", [COPIES, {}], ids=["copies", "shared"])
def test_what_the_user_writes_is_seen(options: dict[str, Any]) -> None:
    """A loaded state, averages that are swapped in, other memory, steps of the user's own; and training goes on from it."""
    with Evaluated(**options) as pair:
        pair.both_trained()
        pair.evaluated()
        pair.on_both(averaged_in_place)
        pair.evaluated()
        pair.both_trained()
        kept = [[p.data for p in each.parameters()] for each, _ in pair.sides]
        pair.on_both(averaged_in_other_memory)
        pair.evaluated()
        for (each, _), own in zip(pair.sides, kept, strict=True):
            for parameter, data in zip(each.parameters(), own, strict=True):
                parameter.data = data
        pair.evaluated()
        pair.both_trained()
        pair.evaluated()
        pair.on_both(loaded)
        pair.evaluated()
        pair.on_both(own_step)
        pair.evaluated()
        pair.both_trained()
        pair.evaluated()
        layout = pair.step._state.layout
        pair.both_trained()
        pair.evaluated()
        assert pair.step._state.layout == layout
        assert_same_parameters(pair.model, pair.twin, 1e-10)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes_of_the_caller_change_nothing(mode: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    model, optimizer = make()
    with compiled(model, optimizer) as step, mode():
        x, target = batch()
        loss, logits = step.evaluate(x, target=target), step.evaluate(x)
        was_inference, has_gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        assert (was_inference, has_gradients) == (mode is torch.inference_mode, mode is torch.enable_grad)
        assert not logits.requires_grad and not logits.is_inference()
        assert_close(logits, model(x).detach())
        assert_close(loss, loss_only(model, x, target))
        with torch.no_grad() if mode is torch.enable_grad else torch.enable_grad():
            assert_close(step.evaluate(x, target=target), loss)
        assert step._specializer.num_programs == 2
    assert not any(tensor.is_inference() for tensor in model.state_dict().values())


def test_a_step_follows_an_evaluation_in_inference_mode() -> None:
    with Evaluated() as pair:
        with torch.inference_mode():
            pair.step.evaluate(pair.x)
        with pytest.warns(UserWarning, match=r"MC3207: a state_dict\(\) .* before the first step does not follow"):
            held = pair.model.state_dict()  # does not follow the first training step, of which a warning says so
            pair.both_trained()
        assert held
        assert_same_parameters(pair.model, pair.twin, 1e-10)


@pytest.mark.parametrize(
    "shape_outputs",
    [
        pytest.param(lambda logits, loss: SequenceClassifierOutput(loss=loss, logits=logits), id="model output"),
        pytest.param(lambda logits, loss: loss if loss is not None else logits, id="tensor"),
        pytest.param(lambda logits, loss: {"loss": loss, "logits": logits}, id="dict"),
        pytest.param(lambda logits, loss: Result(logits, loss), id="dataclass"),
        pytest.param(lambda logits, loss: (loss, logits) if loss is not None else (logits,), id="tuple"),
    ],
)
def test_a_model_that_returns_its_loss(shape_outputs: Callable[..., Any]) -> None:
    model, optimizer = make(lambda: Labelled(shape_outputs))
    x, labels = batch()
    with torch.no_grad():
        expected = [model(x, labels), model(x)]
    with compiled(model, optimizer, loss_fn=None, return_outputs=True) as step:
        loss, outputs = step.evaluate(x, labels=labels)
        alone = step.evaluate(x)
    assert_close(loss, expected[0] if isinstance(expected[0], torch.Tensor) else loss_in(expected[0]))
    for found, wanted in zip((outputs, alone), expected, strict=True):
        assert type(found) is type(wanted)
        found, wanted = (vars(v) if isinstance(v, Result) else v for v in (found, wanted))
        torch.testing.assert_close(found, wanted, **TOLERANCE)


def loss_in(found: Any) -> torch.Tensor:
    return found[0] if isinstance(found, tuple) else found["loss"] if isinstance(found, dict) else found.loss


def test_without_outputs_only_the_loss_is_kept() -> None:
    model, optimizer = make()
    x, target = batch()
    with compiled(model, optimizer) as step:
        assert step.evaluate(x, target=target).shape == ()
        assert str(step.programs[-1]).count("gather(") == 1 and "gather(loss, " in str(step.programs[-1])
        step.evaluate(x)
        assert "and the loss" not in str(step.programs[-1]) and "return None" in str(step.programs[-1])


@pytest.mark.fast
def test_what_each_replica_gives_is_given_apart() -> None:
    def outputs(logits: torch.Tensor, loss: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return logits, (logits > 0).sum(), mirrorc.summed(logits.sum())

    model, optimizer = make(lambda: Labelled(outputs))
    x, _ = batch()
    with torch.no_grad():
        expected = model(x)
    with compiled(model, optimizer, loss_fn=None) as step:
        logits, counts, total = step.evaluate(x)
    assert_close(logits, expected[0])
    assert_close(total, expected[2])
    assert isinstance(counts, PerReplica) and int(sum(counts.values)) == int(expected[1])


def test_a_program_of_an_evaluation_is_kept_printed_and_read(tmp_path: Path) -> None:
    model, optimizer = make()
    model.train()
    x, target = batch(6)
    with compiled(model, optimizer, dump=tmp_path / "dump", cuda_graphs=False, check_finite=True) as step:
        step.prepare(x, target=target)
        assert "gradients" in str(step.memory())
        step.evaluate(x, target=target)
        program = step.programs[-1]
        assert not program.trains and program.stage is Stage.LOWERED and not program.buckets
        verify(program)
        text = program.to_text(slots=True, sources=False)
        assert text.startswith("# mirrorc · stage LOWERED · 2 devices · evaluation\n")
        assert "gather(loss, output=loss, how=averaged)" in text and "buffers may be written from here on" in text
        program.save(tmp_path / "evaluation.mirrorc")
        assert Program.load(tmp_path / "evaluation.mirrorc").to_text(slots=True, sources=False) == text
        report = step.memory()
        assert report.gradients == 0 and report.parameters > 0 and "this is an evaluation" in str(report)
        assert set(step.variables) >= {"first.weight", "norm.running_mean"}
        with pytest.raises(ExecutionError, match=r"MC5005: no call was recorded, and a report needs one training call"):
            step.explain()
        for report in (lambda: step.explain(program), lambda: step.timeline(tmp_path / "trace.json", program)):
            with pytest.raises(
                ExecutionError,
                match=r"so no call of it was recorded\n  why:  only programs that update parameters are timed",
            ):
                report()
    assert any("evaluation" in path.read_text() for path in (tmp_path / "dump").rglob("*.txt"))


def test_an_evaluation_that_fails_changes_nothing() -> None:
    model, optimizer = make(lambda: nn.Sequential(Asserting(), nn.Dropout(0.5)))
    model.train()
    x, target = batch(6)
    with compiled(model, optimizer) as step:
        step(x, target=target)
        step.evaluate(x)
        before, stream = state_of(model), torch.get_rng_state()
        with pytest.raises(ExecutionError, match=r"(?s)finite.*No parameter was changed"):
            step.evaluate(x * float("nan"))
        with pytest.raises(CaptureError, match=r"MC2103: .* raised"):
            step.evaluate(x[:, :3])
        with pytest.raises(ValueError, match="examples"):
            step.evaluate(x[:0])
        with pytest.raises(TypeError, match="cannot be called with these arguments"):
            step.evaluate(x, no_such=1)
        assert torch.equal(torch.get_rng_state(), stream)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        step.evaluate(x)
        assert int(model[0].norm.num_batches_tracked) == int(before["0.norm.num_batches_tracked"]) + 1
        step(x, target=target)
    with pytest.raises(ExecutionError, match="is closed"):
        step.evaluate(x)


@pytest.mark.parametrize("check_finite", ["skip", False, True])
def test_a_loss_that_is_not_finite_is_returned(check_finite: Any) -> None:
    model, optimizer = make()
    x, target = batch()
    x[0, 0] = float("nan")
    with compiled(model, optimizer, check_finite=check_finite) as step:
        assert step.evaluate(x, target=target).isnan()
        assert step.num_skipped == 0


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "no scalar": (lambda logits, loss: logits, {"loss_fn": lambda o, t: (o - o.mean()) ** 2}, "is no scalar"),
    "no loss": (lambda logits, loss: logits, {"loss_fn": lambda o, t: {"other": o}}, "returns no loss"),
    "an integer": (lambda logits, loss: logits, {"loss_fn": lambda o, t: (o > 0).sum()}, "no whole number"),
    "either": (lambda logits, loss: logits.sum().reshape(1), {"loss_fn": None}, "a step cannot tell"),
}


@pytest.mark.fast
@pytest.mark.parametrize(("shape_outputs", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_loss_is_refused(shape_outputs: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    model, optimizer = make(lambda: Labelled(shape_outputs))
    x, target = batch()
    given = {"target": target} if options["loss_fn"] is not None else {}
    with compiled(model, optimizer, **options) as step, pytest.raises(CaptureError, match=message):
        step.evaluate(x, **given)


def test_arguments_that_forward_reads_and_modes_are_evaluated_anew() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.drop = nn.Linear(4, 3), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor, name: str = "") -> torch.Tensor:
            return self.drop(self.last(x)) * (2 if torch.is_grad_enabled() else 3 if name == "long" else 1)

    model, optimizer = make(Scaled)
    x, target = batch()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with compiled(model, optimizer) as step, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(step.evaluate(x), model.last(x).detach())
        assert_close(step.evaluate(x, name="long"), 3 * model.last(x).detach())
        assert_close(step(x, target=target), F.cross_entropy(2 * F.linear(x, *weights), target))
        assert_close(step.evaluate(x), model.last(x).detach())
        model.train()
        assert not torch.allclose(step.evaluate(x), model.last(x))
        model.eval()
        assert_close(step.evaluate(x), model.last(x).detach())
        assert step._specializer.num_programs == 4


def test_an_evaluation_works_with_a_captured_optimizers_options() -> None:
    model, _ = make()
    optimizer = torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], lr=0.01)
    x, target = batch()
    with compiled(model, optimizer, check_replicas_every=1, disable=("share-parameters",)) as step:
        for _ in range(2):
            before = [entry["step"].clone() for entry in optimizer.state.values()]
            assert_close(step.evaluate(x, target=target), loss_only(model, x, target))
            assert [entry["step"] for entry in optimizer.state.values()] == before
            step(x, target=target)
