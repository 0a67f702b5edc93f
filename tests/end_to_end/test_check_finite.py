"""With check_finite, a step with a loss or gradient that is not finite raises and changes nothing, or is skipped, everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from interrupts import Interrupter, interrupt, python_handles_interrupts
from lockstep import Lockstep, State, differences
from torch import nn
from torch.nn import functional as F
from twins import compiled_step

import mirrorc
from mirrorc import ExecutionError, NonFiniteError, passes
from mirrorc.all_reduce_algorithms import Ring
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.options.option import Request
from mirrorc.options.table import OPTIONS, grouped
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline

ADAMW = partial(torch.optim.AdamW, lr=0.01)
ADADELTA = partial(torch.optim.Adadelta, lr=0.5)
UNSHARED = {"disable": ["share-parameters"]}
COPIES = {"link": "copy", **UNSHARED}
WAYS: dict[str, tuple[Any, int, dict[str, Any], bool]] = {  # the optimizer, devices, options, whether in one thread
    "one device": (ADAMW, 1, {}, False),
    "threads": (ADAMW, 2, {}, False),
    "one thread": (ADAMW, 3, {}, True),
    "one bucket": (ADAMW, 4, {"buckets": ByBytes(math.inf, math.inf)}, False),
    "exact order": (ADAMW, 2, {"exact_order": True}, False),
    "mirrored": (ADAMW, 3, UNSHARED, False),
    "copies": (ADAMW, 2, COPIES, False),
    "a ring": (ADAMW, 3, COPIES | {"add": [mirrorc.after("lower-collectives", Ring())]}, False),
    "by itself": (ADADELTA, 3, {}, False),
    "by itself, alone": (ADADELTA, 1, {}, False),
    "by itself, mirrored": (ADADELTA, 2, UNSHARED, False),
    "by itself, copies": (ADADELTA, 2, COPIES, False),
}


class Net(nn.Module):
    """A table, BatchNorm, dropout; the gradient of ``scale`` is not a number where ``hard`` is zero, though the loss is one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.norm = nn.Embedding(40, 6), nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(3))
        self.dropout, self.last = nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, hard: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(self.first(self.table(x))))
        return self.last(hidden) + torch.sqrt(self.scale * hard) + offset.detach()


def batch(hard: float = 1.0, offset: float = 0.0, place: int = 11) -> dict[str, Any]:
    x, target = torch.arange(12) * 5 % 40, torch.arange(12) % 3
    hards, offsets = torch.ones(12, 3), torch.zeros(12, 3)
    hards[place, 1], offsets[place] = hard, offset
    return {"x": x, "hard": hards, "offset": offsets, "target": target}


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of what is finite in the output, and the sum of what is not, without gradient."""
    is_bad = ~output.detach().isfinite()
    return F.cross_entropy(output.masked_fill(is_bad, 0.0), target) + output.detach().masked_fill(~is_bad, 0.0).sum()


BAD_GRADIENT, BAD_LOSS = {"hard": 0.0}, {"offset": math.inf}


def maker(optimizer: Any, devices: int, **options: Any) -> Callable[[], Any]:
    def make() -> tuple[mirrorc.Step, nn.Module, torch.optim.Optimizer]:
        model = Net()
        own, sizes = optimizer(model.parameters()), {"buckets": ByBytes(1e-4, 1e-4)}
        given = {"loss_fn": loss_fn, "backend": "eager", "timeout": 60.0, **sizes, **options}
        return mirrorc.compile(model, devices, optimizer=own, **grouped(given)), model, own

    return make


def lockstep(way: str, check_finite: Any) -> Lockstep:
    optimizer, devices, options, is_interleaved = WAYS[way]
    both = Lockstep(maker(optimizer, devices, check_finite=check_finite, **options), batch())
    for _ in range(2):
        both.go_on()
        for training in (both.undisturbed, both.disturbed):
            trial = training.step._runs.last.trial  # type: ignore[union-attr]
            trial.interleaves, trial.is_decided = is_interleaved, True
    return both


RARE_WAYS = ("one bucket", "mirrored", "copies", "by itself, alone", "by itself, mirrored")


def ways(*usual: str) -> list[Any]:
    marks = {way: pytest.mark.exhaustive if way in RARE_WAYS else pytest.mark.slow for way in WAYS}
    return [pytest.param(way, marks=() if way in usual else marks[way]) for way in WAYS]


@pytest.mark.slow
@pytest.mark.parametrize("way", ways("threads"))
def test_a_step_that_is_not_finite_raises_and_changes_nothing(way: str) -> None:
    both, num_devices = lockstep(way, True), WAYS[way][1]
    devices = [f"cpu:{r}" for r in range(num_devices)]
    with both.undisturbed.step, both.disturbed.step:
        for place, replica in ((0, 0), (11, num_devices - 1)):
            for kind, said in (
                (BAD_GRADIENT, "gradient of 'scale' is not finite (1 of 3 elements, such as nan)\n"),
                (BAD_LOSS, f"the loss on {devices[replica]} is inf\n"),
                (
                    BAD_GRADIENT | BAD_LOSS,
                    f"the loss on {devices[replica]} is inf\n  why:  the reduced gradient of 'scale'",
                ),
            ):
                bad = batch(**kind, place=place)
                raised, has_trained = both.disturb(lambda _: both.disturbed.step(**bad))  # noqa: B023
                assert isinstance(raised, NonFiniteError) and isinstance(raised, ExecutionError) and not has_trained
                assert said in str(raised) and "\n  now:  No parameter was changed\n  fix:  x.isfinite().all()" in str(
                    raised
                ), str(raised)
            both.go_on()
        assert both.disturbed.step.num_skipped == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ways("one thread"))
def test_a_skipped_step_returns_its_loss_and_changes_the_random_stream_alone(way: str) -> None:
    both = lockstep(way, "skip")
    disturbed, calls = both.disturbed, []
    with both.undisturbed.step, disturbed.step as step:
        for place in (0, 11):
            for kind in (BAD_GRADIENT, BAD_LOSS):
                before, replicas, random = disturbed.state(), disturbed.replicas(), disturbed._random
                loss = disturbed.run(batch(**kind, place=place))
                assert loss.isfinite() == (kind is BAD_GRADIENT) and loss.shape == ()
                assert differences(disturbed.state(), before) == ["random stream"]
                assert not differences(disturbed.replicas(), replicas)
                disturbed._random = random
                calls.append(loss)
                assert step.num_skipped == len(calls)
            both.go_on()
        assert both.undisturbed.step.num_skipped == 0
        num_trained = 3 if WAYS[way][3] else 4  # the other way forgets those before it
        assert step.explain().parts_ms["commit"] > 0.0
        assert len(step._recorded(None)[1]) == num_trained, (
            "a step that was skipped is not among those that explain() tells of"
        )


@pytest.mark.slow
@pytest.mark.parametrize("way", ["threads", "by itself, copies"])
def test_a_first_step_may_be_skipped(way: str) -> None:
    optimizer, devices, options, _ = WAYS[way]
    step, model, own = maker(optimizer, devices, check_finite="skip", **options)()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with step:
        step(**batch(**BAD_GRADIENT))
        assert not differences(model.state_dict(), before) and not own.state and step.num_skipped == 1
        step(**batch())
        assert differences(model.state_dict(), before) and len(own.state) == len(list(model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("way", ways())
def test_checks_change_no_bit(way: str) -> None:
    found: list[State] = []
    for check_finite in (False, True, "skip"):
        both = lockstep(way, check_finite)
        with both.undisturbed.step, both.disturbed.step:
            both.go_on()
            found.append(both.undisturbed.state())
    assert not differences(found[1], found[0]) and not differences(found[2], found[0])


@pytest.mark.slow
@pytest.mark.parametrize("way", ["copies", *(way for way in ("threads", "one thread"))])
def test_an_interrupt_while_a_step_is_skipped(way: str) -> None:
    both, interrupter, counted = lockstep(way, "skip"), Interrupter(), []
    disturbed, bad = both.disturbed, batch(**BAD_GRADIENT)
    outcomes = set()
    with python_handles_interrupts(), both.undisturbed.step, disturbed.step as step:
        before, random = disturbed.state(), disturbed._random
        disturbed.run(bad, lambda run: counted.append(interrupter.count(run)))
        disturbed._random = random
        end = counted[0] - 20
        for place in (*range(0, end, 131), *range(end - 100, end, 9)):
            disturbed.run(bad)  # so that the last interrupt leaves no more to do
            disturbed._random, number = random, step.num_skipped
            with pytest.raises(KeyboardInterrupt):
                disturbed.run(bad, lambda run: interrupter.interrupted(run, place, interrupt))  # noqa: B023
            changed = differences(disturbed.state(), before)
            assert changed == ["random stream"] * (step.num_skipped - number), interrupter.where
            outcomes.add(step.num_skipped - number)
            disturbed._random = random
        both.go_on()
    assert outcomes == {0, 1}


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.padded = nn.Embedding(40, 6), nn.Embedding(40, 6, padding_idx=3)
        self.last = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(x) + self.padded(x) + noise)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 1, 3])
def test_gradients_of_factors_are_looked_at_where_they_are_made(devices: int) -> None:
    found: list[State] = []
    x, target, noise = torch.arange(9) * 4 % 40, torch.arange(9) % 5, torch.zeros(9, 6)
    bad = noise.clone()
    bad[8, 2] = math.nan
    for batches in ([noise, noise, noise], [bad, noise, bad, noise, bad, noise]):
        torch.manual_seed(0)
        model = Tables()
        pipeline = default_pipeline(min_factored_elements=0, check_finite="skip")
        with compiled_step(model, F.cross_entropy, devices, optimizer=ADAMW, passes=pipeline) as step:
            for i, given in enumerate(batches):
                place = (x + 7 * (i if given is bad else 0)) % 40  # other rows are bad
                step(place, noise=given, target=target)
            assert f"made {'by shares at the wait' if devices > 1 else 'by pack'}" in str(step.program)
            assert step.num_skipped == sum(given is bad for given in batches)
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert not differences(found[1], found[0])


def hooked(optimizer: torch.optim.Optimizer, calls: list[str]) -> torch.optim.Optimizer:
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize("check_finite", [True, "skip"])
def test_hooks_of_the_optimizer_are_not_called(check_finite: Any) -> None:
    calls: list[str] = []
    step, _, _ = maker(lambda p: hooked(ADAMW(p), calls), 2, check_finite=check_finite)()
    with step:
        step(**batch())
        assert calls == ["before", "after"]
        try:
            step(**batch(**BAD_GRADIENT))
        except NonFiniteError:
            assert check_finite is True
        assert calls == ["before", "after"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64, torch.bfloat16, torch.float32, torch.float64])
def test_finite_sums_that_overflow_are_finite(dtype: torch.dtype) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(50, dtype=dtype))
            self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
            self.nothing = nn.Parameter(torch.zeros(0, dtype=dtype))

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            product = (self.weight * factor).sum() + self.nothing.sum()
            return product.real if product.is_complex() else product

    largest = torch.finfo(dtype).max
    for devices in (1, 2):
        model = Holder()
        own = torch.optim.SGD(model.parameters(), lr=1e-3)
        options: Any = {"loss_reduction": "sum", "backend": "eager", "check_finite": True}
        with mirrorc.compile(model, devices, optimizer=own, **grouped(options)) as step:
            factor = torch.full((2, 50), 0.0, dtype=dtype)
            factor[0] = largest
            step(factor)
            assert model.weight.isfinite().all() and (model.weight != 0).all()
            factor[1, 49] = largest
            kept = model.weight.detach().clone()
            with pytest.raises(NonFiniteError, match=r"'weight' is not finite \(1 of 50 elements, such as .*inf"):
                step(factor)  # the sum of two gradients overflows
            assert torch.equal(model.weight, kept)


def test_a_program_says_what_is_checked_and_is_replayed_from_its_text_and_its_file(tmp_path: Any) -> None:
    step, _, _ = maker(ADAMW, 2, check_finite="skip")()
    with step:
        program = step.prepare(**batch())
        text = str(program)
        assert "b0_share_is_finite" in text and "loss_is_finite, otherwise=skip)" in text
        assert "# -- unless all of this is finite on every device, the step ends here and returns its loss" in text
        assert "remark: check-finite: " in text and "leaves the updates out and returns its loss" in text
        for graph in (module.graph for module in program.device_graphs.values()):
            (commit,) = calls_to(graph, ops.commit)
            assert all(node < commit for node in calls_to(graph, ops.wait)) and len(commit.args) > 1
        program.save(tmp_path / "step.mirror.gz")
        again = mirrorc.Program.load(tmp_path / "step.mirror.gz")
        assert str(again) == text and again.properties == program.properties


def test_what_contradicts_check_finite_is_refused() -> None:
    model = Net()
    own = ADAMW(model.parameters())
    for options, error, words in (
        ({"check_finite": 1}, TypeError, "check_finite is 1: say True"),
        ({"check_finite": "raise"}, ValueError, "check_finite is 'raise'"),
        ({"check_finite": True, "passes": default_pipeline()}, ValueError, "put mirrorc.passes.CheckFinite"),
        ({"check_finite": "skip", "disable": ["check-finite"]}, ValueError, "which disable= switches off"),
    ):
        with pytest.raises(error, match=f"(?s){words}"):
            mirrorc.compile(model, 2, optimizer=own, loss_fn=loss_fn, **grouped(options))
    with pytest.raises(ValueError, match="cannot be used with check_finite=True"):
        asked = {**OPTIONS.defaults, "cuda_graphs": True, "check_finite": True}
        OPTIONS.check_exclusions(Request(asked, pipeline=default_pipeline(check_finite=True)))
    with pytest.raises(ValueError, match="otherwise is 'stop'"):
        passes.CheckFinite("stop")


@pytest.mark.slow
def test_a_pipeline_of_ones_own_may_check() -> None:
    pipeline = default_pipeline(check_finite=True, buckets=ByBytes(1e-4, 1e-4))
    step, _, _ = maker(ADAMW, 2, passes=pipeline, buckets="auto")()
    with step, pytest.raises(NonFiniteError, match="'scale'"):
        step(**batch(**BAD_GRADIENT))
