"""Gradients that are added over calls: the next step is that of the user's own accumulation loop."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import selections
import torch
from module_twins import net
from references import assert_same_model, assert_same_state, refused, relative_error, unchanged
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc.errors import ExecutionError
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.program import Accumulation, Program, Stage
from mirrorc.passes import default_pipeline
from mirrorc.runtime.state.gradients.accumulated_gradients import AccumulatedGradients

TOLERANCE = 1e-11
Batch = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[Any], torch.optim.Optimizer]


adamw = partial(torch.optim.AdamW, lr=0.05)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
asgd = partial(torch.optim.ASGD, lr=0.1)


def batches(*sizes: int, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(n, 6, generator=generator, dtype=torch.float64) for n in sizes]
    return [(one, torch.randint(3, (len(one),), generator=generator)) for one in x]


class Both(Twins):
    def __init__(
        self, num_devices: int = 2, model: nn.Module | None = None, make: Any = sgd, loss_fn: Any = None, **options: Any
    ) -> None:
        model, loss_fn = net() if model is None else model, loss_fn or F.cross_entropy
        super().__init__(model, make, loss_fn, num_devices, progress=False, tolerance=TOLERANCE, **options)
        self.is_sum = options.get("loss_reduction") == "sum"

    def call(self, batch: Batch, total: int, *, ends: bool = False) -> None:
        """A call of both; ``total``: examples of all calls until the update, with the one that ends."""
        x, y = batch
        loss = (self.step if ends else self.step.accumulate)(x, target=y)
        expected = self.backward(x, target=y, loss_scale=1.0 if self.is_sum else len(x) / total)
        assert not isinstance(loss, torch.Tensor) or loss.item() == pytest.approx(expected.item())
        if ends:
            self.before_update()
            self.update()

    def before_update(self) -> None:
        """What a test does with the twin's gradients."""

    def train(self, *own: Batch) -> None:
        for i, batch in enumerate(own):
            self.call(batch, sum(len(x) for x, _ in own), ends=i == len(own) - 1)

    def check(self) -> None:
        assert_same_model(self.model, self.twin, TOLERANCE)
        assert self.step.num_accumulated == 0


MIRRORED: dict[str, Any] = {"disable": ("share-parameters",)}


CASES = [(2, asgd, MIRRORED), (1, adamw, {}), (3, sgd, {}), (4, asgd, {}), (3, adamw, MIRRORED)]
RARE = [(4, sgd, {}), (2, adamw, MIRRORED), (1, asgd, {}), (2, sgd, {}), (4, adamw, {}), (4, sgd, MIRRORED)]


@pytest.mark.parametrize(("num_devices", "make", "options"), [*CASES, *selections.exhaustive(*RARE)])
def test_a_step_updates_with_the_mean_over_all_examples_since_the_last_update(
    num_devices: int, make: Make, options: dict[str, Any]
) -> None:
    with Both(num_devices, make=make, **options) as both:
        both.train(*batches(4, 4))
        both.train(*batches(7, 2, 4, seed=1))  # uneven, one with fewer examples than devices
        both.train(*batches(4, seed=2))
        both.train(*batches(2, 4, seed=3))
        both.check()
        assert_same_state(both.optimizer, both.twin_optimizer, TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [{"loss_fn": nn.CrossEntropyLoss(reduction="sum"), "loss_reduction": "sum"}, {"backend": "inductor"}],
    ids=["sum", "inductor"],
)
def test_sums_are_added_up_and_inductor_gives_the_same_update(options: dict[str, Any]) -> None:
    with Both(**options) as both:
        both.train(*batches(4, 3, 6))
        both.train(*batches(3))
        both.check()


def test_clipping_and_its_norm_are_of_the_mean_over_all_calls() -> None:
    with Both(clip_grad_norm=0.05, clip_grad_value=0.02) as both:
        norms: list[torch.Tensor] = []

        def clip() -> None:
            norms.append(nn.utils.clip_grad_norm_(both.twin.parameters(), 0.05))
            nn.utils.clip_grad_value_(both.twin.parameters(), 0.02)

        both.before_update = clip
        both.train(*batches(5, 3))
        assert relative_error(both.step.grad_norm, norms[0]) < TOLERANCE
        both.check()


@pytest.mark.fast
def test_scales_that_change_between_calls_are_made_up_for() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    with Both(scaler=scaler) as both:
        both.call(batches(4)[0], 8)
        scaler.update(8.0)
        both.call(batches(4, seed=1)[0], 8, ends=True)
        both.check()
        assert scaler.get_scale() == 16.0


def test_float16_overflows_where_it_does_in_a_loop_that_divides_losses() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1) for _ in range(2)]
    with Both(1, model, scaler=scalers[0], autocast=torch.float16) as both:
        for update in range(12):
            own = [(torch.randn(4, 4), torch.randint(0, 3, (4,))) for _ in range(4)]
            for i, (x, y) in enumerate(own):
                call = both.step if i == len(own) - 1 else both.step.accumulate
                call(x, target=y)
                with torch.autocast("cpu", torch.float16):
                    loss = F.cross_entropy(both.twin(x), y) / len(own)
                scalers[1].scale(loss).backward()
            scalers[1].step(both.twin_optimizer)
            scalers[1].update()
            both.twin_optimizer.zero_grad()
            assert scalers[0].state_dict() == scalers[1].state_dict(), update
        assert both.step.num_skipped > 1, "the scale grows until it is too large"


def not_finite() -> Batch:
    x, y = batches(4)[0]
    return x * float("nan"), y


@pytest.mark.fast
def test_an_update_that_is_skipped_uses_accumulated_gradients_up() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with Both(scaler=scaler) as both:
        with unchanged(both.model):
            (x, y), (u, v) = not_finite(), batches(4)[0]
            both.step.accumulate(x, target=y)
            both.step(u, target=v)
        assert (both.step.num_skipped, both.step.num_accumulated, scaler.get_scale()) == (1, 0, 4.0)
        both.train(*batches(4, 4))
        both.check()


def test_a_call_that_is_not_finite_adds_nothing() -> None:
    with Both(check_finite=True) as both:
        first, last = batches(4, 3)
        both.call(first, 7)
        for call in (both.step.accumulate, both.step):
            with unchanged(both.model), pytest.raises(mirrorc.NonFiniteError, match=r"'0.weight' is not finite"):
                call(not_finite()[0], target=not_finite()[1])
            assert both.step.num_accumulated == 4
        both.call(last, 7, ends=True)
        both.check()


def test_what_is_kept_survives_all_that_comes_between() -> None:
    def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    with Both(make=adamw) as both:
        own = batches(4, 4, 6, 3)
        both.train(*batches(4, seed=5))
        both.call(own[0], 17)
        both.step.evaluate(own[0][0])
        with pytest.raises(ValueError):
            both.step(own[0][0][:3], target=own[0][1])
        both.call(own[1], 17)
        both.on_both(load)
        both.call(own[2], 17)
        both.model[0].weight.data = both.model[0].weight.data.clone()
        both.call(own[3], 17, ends=True)
        both.check()


def test_gradients_of_parameters_that_are_frozen_for_a_while_are_kept() -> None:
    with Both() as both:
        for i, batch in enumerate(batches(4, 3, 5)):
            both.on_both(lambda model, _, i=i: model[0].requires_grad_(i != 1))
            both.call(batch, 12, ends=i == 2)
        both.check()


def test_parameters_that_are_added_begin_with_nothing() -> None:
    with Both(make=lambda parameters: sgd(list(parameters)[2:])) as both:
        first, last = batches(4, 4)
        both.twin[0].requires_grad_(False)  # torch would keep a gradient that no optimizer holds
        both.call(first, 8)
        both.on_both(lambda model, own: own.add_param_group({"params": list(model[0].parameters()), "lr": 0.01}))
        both.twin[0].requires_grad_(True)
        both.call(last, 8, ends=True)
        both.check()


def test_a_step_that_does_not_train_what_was_accumulated_is_refused() -> None:
    with Both() as both:
        x, y = batches(4)[0]
        both.step.accumulate(x, target=y)
        both.model[2].requires_grad_(False)
        with refused(ValueError, r"kept a gradient of '2.bias', which this step does not", both.model):
            both.step(x, target=y)
        assert both.step.num_accumulated == 4
        both.step.zero_grad()
        both.step(x, target=y)


@pytest.mark.parametrize("how", ["step", "optimizer", "model", "part"])
def test_zero_grad_drops_what_is_kept(how: str) -> None:
    with Both() as both:
        (first, last), total = batches(4, 4), 8 if how == "part" else 4
        both.call(first, total)
        if how == "step":
            both.step.zero_grad()
            both.twin.zero_grad()
        else:
            both.on_both(lambda model, own: {"optimizer": own, "model": model, "part": model[0]}[how].zero_grad())
        assert both.step.num_accumulated == (4 if how == "part" else 0)
        both.call(last, total, ends=True)
        both.check()


def test_a_call_that_fails_while_it_is_added_is_told_of_until_it_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: AccumulatedGradients, bucket: int, replica: int, packed: torch.Tensor) -> None:
        raise MemoryError("no memory")

    with Both() as both:
        x, y = batches(4)[0]
        both.step.accumulate(x, target=y)
        with monkeypatch.context() as patch:
            patch.setattr(AccumulatedGradients, "add", fail)
            with pytest.raises(
                ExecutionError, match=r"no memory\n  now:  The update had begun\. No parameter was changed, but the"
            ):
                both.step.accumulate(x, target=y)
        for call in (both.step.accumulate, both.step):
            with pytest.raises(
                ExecutionError,
                match=r"MC5002: .*\n  why:  those that are kept may be incomplete\n  fix:  step\.zero_grad\(\)",
            ):
                call(x, target=y)
        both.step.zero_grad()
        both.train(*batches(4, 4))
        both.check()


def test_buffers_and_random_numbers_go_on_from_call_to_call() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    with Both(1, model) as both:
        both.train(*batches(4, 5))
        both.check()
    with Both(2, nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 3)).double(), return_outputs=True) as both:
        x, y = batches(8)[0]
        outputs = [call(x, target=y)[1] for call in (both.step.accumulate, both.step.accumulate, both.step)]
        assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])
        assert outputs[0].shape == (8, 3)


@dataclass(frozen=True)
class DoubleBuckets:
    changes_dataflow: bool = True
    name: str = field(default="double-buckets", init=False)
    input_stage: Stage = field(default=Stage.PACKED, init=False)
    output_stage: Stage = field(default=Stage.PACKED, init=False)

    def run(self, program: Program) -> Program:
        program = program.evolve(graph=copied(program.mirrored_graph))
        output = program.mirrored_graph.output_node()
        given: Any = output.args[0]
        packed = tuple(
            tuple(insert(program, output, torch.ops.aten.mul.Tensor, (value, 2.0)) for value in own)
            for own in given["packed"]
        )
        output.args = ({**given, "packed": packed},)
        return program


@pytest.mark.parametrize("num_devices", [1, 2])
def test_what_a_pass_does_to_buckets_is_done_once_with_the_sum(num_devices: int) -> None:
    with Both(num_devices, add=[mirrorc.after("pack-gradients", DoubleBuckets())]) as both:

        def double() -> None:
            for parameter in both.twin.parameters():
                parameter.grad *= 2

        both.before_update = double
        both.train(*batches(4, 4, 4))
        both.check()


def test_large_gradients_and_tables_are_added_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(8, 3)).double()
    with Both(2, model, passes=default_pipeline(min_factored_elements=0)) as both:
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            own = [(torch.randint(50, (n, 2), generator=generator), torch.arange(n) % 3) for n in (4, 6)]
            both.train(*own)
            assert "no gradient stays factors: those of several calls are added up whole" in str(both.step.programs[-1])
            both.train(own[0])  # by shares, from factors, in the buckets that the others have written
            assert "index_add" in str(both.step.programs[-1])
        both.check()


def test_the_program_says_what_is_kept_and_the_report_counts_it() -> None:
    with Both() as both:
        x, y = batches(4)[0]
        both.step(x, target=y)
        plain = both.step.memory().gradients
        both.step.accumulate(x, target=y)
        assert both.step.programs[-1].accumulation is Accumulation.ADDS
        assert "accumulate(bucket=0, b0)" in str(both.step.programs[-1])
        assert both.step.memory(both.step.programs[-1]).gradients == 2 * plain
        assert "gradients of 1 call kept, 4 examples" in repr(both.step)
        both.step(x, target=y)
        assert both.step.programs[-1].accumulation is Accumulation.ENDS
        assert "add_accumulated(bucket=0, b0)" in str(both.step.programs[-1])
        assert both.step.memory(both.step.programs[-1]).gradients == 2 * plain
        sums = both.step._state.accumulated
        both.step(x, target=y)
        assert both.step.programs[-1].accumulation is Accumulation.NONE
        assert both.step.memory(both.step.programs[-1]).gradients == plain
        with pytest.raises(IndexError):
            sums._sums.flat[0]  # their memory is free


def test_habits_beside_accumulated_gradients_are_told_of() -> None:
    with Both() as both:
        x, y = batches(4)[0]
        both.step.accumulate(x, target=y)
        with pytest.warns(UserWarning, match=r"the next call of the step updates with them"):
            both.optimizer.step()
        with pytest.warns(
            UserWarning, match=r"closed in the middle of an accumulation: gradients of 1 call kept, 4 examples"
        ):
            both.step.close()
    with Both() as both, warnings.catch_warnings(action="error"):
        both.train(*batches(4, 4))
        both.step.close()


def test_a_step_does_not_leave_out_what_another_has_kept_of_its_parameters() -> None:
    model, x, y = nn.Linear(3, 2), torch.ones(4, 3), torch.ones(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        compiled_step(model, F.mse_loss, optimizer=optimizer) as one,
        compiled_step(model, F.l1_loss, optimizer=optimizer) as other,
    ):
        one.accumulate(x, target=y)
        with refused(
            ValueError,
            r"(?s)accumulate\(\) of another step keeps a gradient of 'weight'.*  or:   .*zero_grad\(\)",
            model,
        ):
            other(x, target=y)
        one(x, target=y)
        other(x, target=y)
        one.accumulate(x, target=y)
        one.zero_grad()
        other(x, target=y)
