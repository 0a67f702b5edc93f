from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from references import assert_mirrored
from tiny_programs import captured_model, captured_two_layers, handmade, sgd_step
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.compilation.call_kind import Purpose
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.runtime.communication import Aborted
from mirrorc.runtime.devices.thread_pool import DevicePool
from mirrorc.runtime.execution.binding import interleaving
from mirrorc.runtime.execution.binding.interleaving import InterleavingTrial, can_interleave, interleave


def fed(trial: InterleavingTrial, seconds: float) -> None:
    for _ in range(12):
        trial.record(seconds)


def test_short_steps_are_interleaved_and_stay_so_if_that_is_faster() -> None:
    trial = InterleavingTrial(True)
    fed(trial, 3e-4)
    assert (trial.interleaves, trial.is_decided) == (True, False)
    fed(trial, 2e-4)
    assert (trial.interleaves, trial.is_decided) == (True, True)
    fed(trial, 9e-4)
    assert trial.interleaves


def test_interleaving_that_is_slower_is_given_up() -> None:
    trial = InterleavingTrial(True)
    fed(trial, 3e-4)
    fed(trial, 4e-4)
    assert (trial.interleaves, trial.is_decided) == (False, True)


@pytest.mark.parametrize(("can", "seconds"), [(True, 2e-3), (False, 1e-4)])
def test_long_steps_and_those_that_cannot_are_not_tried(can: bool, seconds: float) -> None:
    trial = InterleavingTrial(can)
    fed(trial, seconds)
    fed(trial, seconds / 10)
    assert (trial.interleaves, trial.is_decided) == (False, True)


def test_the_first_steps_do_not_count() -> None:
    trial = InterleavingTrial(True)
    for seconds in (1.0, 1.0, 1.0, *[3e-4] * 9):
        trial.record(seconds)
    assert trial.interleaves


def test_every_replica_runs_to_its_next_pause_in_each_round() -> None:
    said: list[str] = []

    def steps(name: str, num_pauses: int) -> Iterator[None]:
        for i in range(num_pauses):
            said.append(f"{name}{i}")
            yield
        return name  # type: ignore[return-value]

    found: list[Any] = []
    interleave([steps("a", 2), steps("b", 1)], found)  # type: ignore[list-item]
    assert found == [(True, "a"), (True, "b")]
    assert said == ["a0", "b0", "a1"]


def test_a_failure_ends_all() -> None:
    closed: list[str] = []

    def steps(name: str) -> Iterator[None]:
        try:
            yield
            if name == "b":
                raise KeyError(name)
            yield
        finally:
            closed.append(name)

    found: list[Any] = []
    interleave([steps(name) for name in "abc"], found)  # type: ignore[misc]
    assert [is_done for is_done, _ in found] == [False] * 3
    assert [type(error) for _, error in found] == [Aborted, KeyError, Aborted] and sorted(closed) == ["a", "b", "c"]


@pytest.mark.slow
def test_which_programs_can_be_interleaved() -> None:
    def lowered(program: mirrorc.ir.program.Program, **options: Any) -> mirrorc.ir.program.Program:
        return run_passes(program, [p for p in default_pipeline(**options) if p.name not in left_out])

    left_out: tuple[str, ...] = ()
    assert can_interleave(lowered(captured_two_layers(2)))
    assert can_interleave(lowered(captured_two_layers(3), buckets=ByBytes(1e-5, 1e-5)))
    assert not can_interleave(lowered(captured_two_layers(1)))
    assert not can_interleave(lowered(captured_two_layers(2), link="copy"))
    left_out = ("share-parameters",)  # optimizers of all replicas take the sum of an all_reduce
    assert not can_interleave(lowered(captured_two_layers(2)))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.drop = nn.Embedding(30, 8), nn.Linear(8, 6), nn.Dropout(0.5)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.body(self.table(rows)))))


def trained(
    monkeypatch: pytest.MonkeyPatch, longest_seconds: float, num_devices: int
) -> tuple[nn.Module, list[float], bool]:
    monkeypatch.setattr(interleaving, "LONGEST_SECONDS", longest_seconds)
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    pipeline = default_pipeline(min_factored_elements=0, buckets=ByBytes(2e-4, 1e-4))
    with mirrorc.compile(
        model,
        num_devices,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        compiler=mirrorc.Compiler(backend="eager", passes=pipeline),
    ) as step:
        for i in range(60):
            n = 2 * num_devices + (i % 7 == 6)  # now and then a batch that does not divide evenly
            rows, target = (torch.randint(high, (n,), generator=generator) for high in (30, 3))
            losses.append(step(rows, target=target).item())
        assert_mirrored(step, model, num_devices)
        assert len(step.explain().buckets) == len(step.program.buckets)
        seldom, often = step._specializer._caches[Purpose.STEP]  # in the order of their last use
        assert often.trial.is_decided and not seldom.trial.is_decided  # which has not come often enough
        assert (
            bool(often.functions.pausing) == (longest_seconds > 0) and often.is_interleaved == often.trial.interleaves
        )
        assert ("interleaved" in str(step.explain())) == often.is_interleaved
    return model, losses, often.is_interleaved


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_interleaving_gives_the_bits_that_threads_give(monkeypatch: pytest.MonkeyPatch, num_devices: int) -> None:
    """Whatever is faster here: one run never interleaves, in the other interleaving is always faster."""
    by_threads, losses, _ = trained(monkeypatch, 0.0, num_devices)
    record = InterleavingTrial.record

    def as_if_faster(self: InterleavingTrial, seconds: float) -> None:
        record(self, 0.1 if self.interleaves else 0.2)

    monkeypatch.setattr(InterleavingTrial, "record", as_if_faster)
    interleaved, same_losses, was_interleaved = trained(monkeypatch, 1.0, num_devices)
    assert was_interleaved and losses == same_losses
    for one, other in zip(by_threads.state_dict().values(), interleaved.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("num_devices", [2, 3])
def test_gradients_of_interleaved_replicas_have_the_bits_of_threads(
    monkeypatch: pytest.MonkeyPatch, num_devices: int
) -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), torch.randn(2 * num_devices + 1, 4)
    eager, small = mirrorc.Compiler(backend="eager"), mirrorc.Communication(buckets=ByBytes(2e-5, 2e-5))

    def gradients(is_interleaved: bool) -> list[torch.Tensor]:
        with mirrorc.data_parallel(model, num_devices, compiler=eager, communication=small) as module:
            for _ in range(3):
                model.zero_grad()
                module(x).square().sum().backward()
            assert module._calls._runs.last is not None
            assert module._calls._runs.last.is_interleaved is is_interleaved and len(module.programs[1].buckets) > 1
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    by_threads = gradients(False)
    interleave_at_once(monkeypatch)
    for one, other in zip(by_threads, gradients(True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_interleaving_is_given_up_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What shares know of their memory is known of their own way alone."""
    by_threads, losses, _ = trained(monkeypatch, 0.0, 2)
    record = InterleavingTrial.record
    monkeypatch.setattr(
        InterleavingTrial, "record", lambda self, seconds: record(self, 0.3 if self.interleaves else 0.2)
    )
    tried, same_losses, was_interleaved = trained(monkeypatch, 1.0, 2)
    assert not was_interleaved and losses == same_losses
    for one, other in zip(by_threads.state_dict().values(), tried.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def interleave_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make = InterleavingTrial.__init__

    def decided(self: InterleavingTrial, can_interleave: bool) -> None:
        make(self, can_interleave)
        self.interleaves = self.is_decided = can_interleave

    monkeypatch.setattr(InterleavingTrial, "__init__", decided)


@pytest.mark.slow
@pytest.mark.parametrize("replica", [0, 1])
def test_a_failing_interleaved_step_says_whose_it_is_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, replica: int
) -> None:
    interleave_at_once(monkeypatch)
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    rows, target = torch.arange(4), torch.tensor([0, 1, 2, 0])
    with mirrorc.compile(
        model, 2, optimizer=optimizer, loss_fn=F.cross_entropy, compiler=mirrorc.Compiler(backend="eager")
    ) as step:
        step(rows, target=target)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        wrong = rows.clone()
        wrong[2 * replica] = 30
        with pytest.raises(
            mirrorc.ExecutionError, match=rf"replica {replica} on cpu:{replica} in .*index out of range"
        ):
            step(wrong, target=target)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        step(rows, target=target)
        assert not torch.equal(before[-1], list(model.parameters())[-1])


@pytest.mark.slow
def test_settings_of_the_callers_thread_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved steps run in it: its number of threads stays, and its modes do not reach the step."""
    interleave_at_once(monkeypatch)
    ran: list[int] = []
    run_here = DevicePool.run_here

    def counted(self: DevicePool, job: Callable[[], Any]) -> Any:
        def watched() -> Any:
            ran.append(torch.get_num_threads())
            assert not torch.is_grad_enabled()
            return job()

        return run_here(self, watched)

    monkeypatch.setattr(DevicePool, "run_here", counted)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    before = torch.get_num_threads()
    x, target = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    with sgd_step(model, loss_fn=F.cross_entropy) as step:
        step(x, target=target)
        assert ran == [max(1, before // 2)]
        with torch.device("meta"):
            assert step(x, target=target).device.type == "cpu"
        assert len(ran) == 1  # by threads
    assert torch.get_num_threads() == before and torch.is_grad_enabled()


@pytest.mark.slow
def test_an_interrupt_is_raised_and_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    interleave_at_once(monkeypatch)
    model = nn.Linear(4, 3)
    x, target = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    with sgd_step(model, loss_fn=F.cross_entropy) as step:
        step(x, target=target)
        region = next(iter(step._runs.last.regions[1]))  # type: ignore[union-attr]
        function = step._runs.last.functions.pausing[1]  # type: ignore[union-attr]

        def interrupted(*_: object) -> Any:
            raise KeyboardInterrupt

        name = next(key for key, value in function.namespace.items() if value is step._runs.last.regions[1][region])  # type: ignore[union-attr]
        kept, function.namespace[name] = function.namespace[name], interrupted
        with pytest.raises(KeyboardInterrupt):
            step(x, target=target)
        function.namespace[name] = kept
        assert step(x, target=target).isfinite()


@pytest.mark.slow
def test_other_programs_run_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    interleave_at_once(monkeypatch)
    make: Callable[..., torch.optim.Optimizer] = (
        torch.optim.Adadelta
    )  # its foreach may differ; it runs by itself or not
    model = nn.Linear(4, 3)
    with mirrorc.compile(
        model,
        2,
        optimizer=make(model.parameters()),
        loss_fn=F.cross_entropy,
        compiler=mirrorc.Compiler(backend="eager"),
        communication=mirrorc.Communication(link="copy"),
    ) as step:
        for _ in range(3):
            assert step(torch.randn(4, 4), target=torch.tensor([0, 1, 2, 0])).isfinite()
        assert not step._runs.last.trial.interleaves  # type: ignore[union-attr]


@pytest.mark.slow
def test_programs_made_by_hand_can_if_they_are_alike() -> None:
    for num_devices in (2, 4):
        assert can_interleave(run_passes(handmade(num_devices), default_pipeline()))
    assert can_interleave(run_passes(captured_model(nn.Linear(4, 3), 2, rows=5), default_pipeline()))
