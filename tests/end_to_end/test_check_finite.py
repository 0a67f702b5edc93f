"""With check_finite, a step with a loss or gradient that is not finite raises and changes nothing, or is skipped, everywhere."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from interrupts import Interrupter, interrupt, python_handles_interrupts
from lockstep import Lockstep, State, differences
from references import refused
from small_modules import module_of
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


@pytest.mark.parametrize("way", ways())
def test_checks_change_no_bit(way: str) -> None:
    found: list[State] = []
    for check_finite in (False, True, "skip"):
        both = lockstep(way, check_finite)
        with both.undisturbed.step, both.disturbed.step:
            both.go_on()
            found.append(both.undisturbed.state())
    assert not differences(found[1], found[0]) and not differences(found[2], found[0])


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


@pytest.mark.parametrize("devices", [2, 1, 3])
def test_gradients_of_factors_are_looked_at_where_they_are_made(devices: int) -> None:
    found: list[State] = []
    x, target, noise = torch.arange(9) * 4 % 40, torch.arange(9) % 5, torch.zeros(9, 6)
    bad = noise.clone()
    bad[8, 2] = math.nan
    for batches in ([noise, noise, noise], [bad, noise, bad, noise, bad, noise]):
        torch.manual_seed(0)
        model = module_of(
            lambda self, x, noise: self.last(self.table(x) + self.padded(x) + noise),
            table=nn.Embedding(40, 6),
            padded=nn.Embedding(40, 6, padding_idx=3),
            last=nn.Linear(6, 5),
        )
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


@pytest.mark.fast
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


@pytest.mark.fast
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


def test_a_pipeline_of_ones_own_may_check() -> None:
    pipeline = default_pipeline(check_finite=True, buckets=ByBytes(1e-4, 1e-4))
    step, _, _ = maker(ADAMW, 2, passes=pipeline, buckets="auto")()
    with step, pytest.raises(NonFiniteError, match="'scale'"):
        step(**batch(**BAD_GRADIENT))


# check_replicas_every finds memory of one replica that has gone bad, before a step spreads it.


MIRRORED: dict[str, Any] = {"disable": ["share-parameters"], "buckets": ByBytes(1e-4, 1e-4)}


BATCH = {"x": torch.linspace(-1, 1, 36).reshape(6, 6).sin(), "target": torch.tensor([0, 1, 2, 0, 1, 2])}


def compiled(
    devices: int, every: int, optimizer: Any = torch.optim.AdamW, **options: Any
) -> tuple[Any, nn.Module, Any]:
    torch.manual_seed(0)
    model = module_of(
        lambda self, x: self.last(self.norm(self.first(x))) * self.frozen,
        first=nn.Linear(6, 8),
        norm=nn.BatchNorm1d(8),
        last=nn.Linear(8, 3),
        frozen=nn.Parameter(torch.ones(3), requires_grad=False),
    )
    own = optimizer(model.parameters(), lr=0.01)
    given = {"loss_fn": F.cross_entropy, "backend": "eager", "check_replicas_every": every, **options}
    return mirrorc.compile(model, devices, optimizer=own, **grouped(given)), model, own


def flip_a_bit(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.uint8).numpy()[-1] ^= 1


@pytest.mark.parametrize(
    ("devices", "replica", "who"),
    [(3, 1, "cpu:1 differs from cpu:0 and cpu:2 \\(\\d bytes?\\)"), (2, 0, "none has a majority")],
)
def test_a_parameter_gone_bad_is_named_until_a_checkpoint_is_loaded(devices: int, replica: int, who: str) -> None:
    step, model, own = compiled(devices, 3, **MIRRORED)
    with step:
        for _ in range(3):
            step(**BATCH)  # the third is checked
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        flip_a_bit(step.variables["last.weight"].values[replica])
        flip_a_bit(step.variables["norm.bias"].values[replica])
        for _ in range(2):
            step(**BATCH)  # not checked
        for _ in range(2):  # nothing has been mended in between
            with refused(
                ExecutionError, rf"'norm.bias' are not equal any more\n.*{who}.*\n.*\n.*load a checkpoint", model, own
            ):
                step(**BATCH)
        model.load_state_dict(kept)
        own.load_state_dict(own.state_dict())
        for _ in range(4):
            step(**BATCH)
        for name, _ in model.named_parameters():
            assert all(torch.equal(value, step.variables[name].value) for value in step.variables[name].values)


def test_bad_state_of_the_optimizer_is_named() -> None:
    for optimizer, entry in ((torch.optim.AdamW, "exp_avg_sq"), (torch.optim.RMSprop, "square_avg")):
        step, _, own = compiled(2, 1, optimizer, **MIRRORED)
        with step:
            for _ in range(2):
                step(**BATCH)
            found = next(t for _, key, t in step._state.optimizers.copies() if key == entry)
            flip_a_bit(found[1][:1])
            with pytest.raises(ExecutionError, match=rf"the replicas' copies of {entry} of '[\w.]+' are not equal"):
                step(**BATCH)
            own.load_state_dict(own.state_dict())
            step(**BATCH)


@pytest.mark.fast
def test_copies_of_what_an_optimizer_by_itself_updates_are_compared_too() -> None:
    step, model, _ = compiled(2, 1, torch.optim.Adadelta, **MIRRORED)
    with step:
        step(**BATCH)
        flip_a_bit(step.variables["first.bias"].values[1])
        with pytest.raises(ExecutionError, match=r"the replicas' copies of 'first\.bias' are not equal any more"):
            step(**BATCH)
        model.load_state_dict(model.state_dict())
        step(**BATCH)
        assert torch.equal(*step.variables["first.bias"].values)


@pytest.mark.fast
def test_calls_for_gradients_copy_parameters_in_place_of_comparing_them() -> None:
    step, _, _ = compiled(2, 1, **MIRRORED)
    with step:
        step(**BATCH)
        copies = step.variables["first.bias"].values
        flip_a_bit(copies[1])
        assert not torch.equal(*copies)
        step.gradients(**BATCH)
        assert torch.equal(*copies)


def test_what_replicas_have_of_their_own_is_not_compared() -> None:
    step, model, _ = compiled(3, 1, **MIRRORED)
    with step:
        for training in (True, True, False, False, True):
            model.train(training)
            step(**BATCH)
        values = step.variables["norm.running_mean"].values
        assert not torch.equal(values[0], values[1])


def test_devices_that_share_their_parameters_are_said_to_have_nothing_to_compare() -> None:
    for devices, options, why in (
        (1, {}, "there is one device"),
        (2, {}, "parameters and optimizer state are kept once for all devices"),
        (2, MIRRORED, None),
    ):
        step, _, _ = compiled(devices, 1, **options)
        with step:
            step(**BATCH)
            step(**BATCH)
            said = f"# remark: check_replicas_every has nothing to compare: {why}"
            assert (said in str(step.program)) is (why is not None)


@pytest.mark.fast
def test_wrong_numbers_are_refused() -> None:
    for every, error in ((-1, ValueError), (True, TypeError), (1.5, TypeError), ("2", TypeError), (None, TypeError)):
        with pytest.raises(error, match="check_replicas_every is"):
            compiled(2, every)  # type: ignore[arg-type]
    step, _, _ = compiled(2, 0)
    step.close()
