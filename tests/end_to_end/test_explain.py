"""`Step.explain` and `Step.timeline` on real runs: figures hold together whatever the machine does meanwhile."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import CountedSigns
from tiny_models import make_mlp, mlp_batch
from tiny_programs import sgd_step
from torch import nn
from torch.profiler import profile
from twins import compiled_step

import mirrorc
from mirrorc import ExecutionError
from mirrorc.packing import ByBytes
from mirrorc.runtime.profiling.explanation import Explanation
from mirrorc.step import Step

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
SMALL = {"buckets": ByBytes(1e-4, 1e-4)}
SHARE = "share-parameters"


def compiled(
    num_devices: int = 2, make_optimizer: Any = SGD, model: nn.Module | None = None, **options: Any
) -> mirrorc.Step:
    options = {"loss_fn": F.cross_entropy, "timeout": 60.0, **options}
    return compiled_step(model or make_mlp(), devices=num_devices, optimizer=make_optimizer, **options)


def check(step: mirrorc.Step, found: Explanation, num_steps: int) -> None:
    program = step.program
    names = [device.name for device in program.devices]
    assert found.num_steps == num_steps and [device.device for device in found.devices] == names
    assert {bucket.index for bucket in found.buckets} == {bucket.index for bucket in program.buckets}
    for times in found.buckets:
        assert times.num_bytes == program.buckets[times.index].num_bytes
        assert set(names) >= {own.device for own in times.devices}
        for one in (times, *times.devices):
            assert one.exposed_ms == one.skew_ms + one.transfer_ms
            assert min(one.hidden_ms, one.skew_ms, one.transfer_ms) >= 0.0
            assert 0.0 <= one.ready_ms <= one.launched_ms <= one.finished_ms
    assert found.exposed_ms == pytest.approx(sum(bucket.exposed_ms for bucket in found.buckets))
    assert found.hidden_ms == pytest.approx(sum(bucket.hidden_ms for bucket in found.buckets))
    for device in found.devices:
        if num_steps == 1:
            assert device.compute_ms == pytest.approx(sum(device.region_ms.values()))
        assert 0.0 <= device.started_ms < device.finished_ms
    assert min(found.compute_ms, found.update_ms, found.step_ms) > 0.0 and found.other_ms >= 0.0 and found.advice
    lines = str(found).split("\n")
    rows = [line.split("  ")[0] for line in lines if re.match(r"b\d", line)]
    assert rows == [total.label for total in found.totals]
    rows = [line.split("  ")[1] for line in lines if re.match(r"  b\d", line)]
    assert rows == ([bucket.label for bucket in found.buckets if bucket not in found.totals])
    behind = tuple(bucket.behind for bucket in found.buckets if bucket.behind)  # never cut
    assert max(len(line) for line in lines if not line.endswith(behind)) <= 110


@pytest.mark.parametrize("without", [(), (SHARE,)], ids=["shared", "mirrored"])
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_figures_of_real_runs_hold_together(num_devices: int, without: tuple[str, ...], tmp_path: Path) -> None:
    with compiled(num_devices, disable=without, **SMALL) as step:
        for seed in range(6):
            step(**mlp_batch(7, seed=seed))  # uneven on 2 and 3 devices
        found = step.explain()
        check(step, found, 5)
        assert len(found.buckets) >= 4
        kind = "none" if num_devices == 1 else "all_reduce" if without else "reduce_scatter"
        assert {bucket.kind for bucket in found.buckets} == {kind}
        assert [bucket.index for bucket in found.buckets] == [bucket.index for bucket in step.program.buckets]
        events = json.loads(step.timeline(tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(e["cat"] == "step" for e in events if e["ph"] == "X") == 6
    assert sum(e["ph"] == "b" for e in events) == (0 if num_devices == 1 else 6 * len(found.buckets))
    assert sum(e["ph"] == "X" and e["cat"] == "backward" for e in events) >= 6 * num_devices * len(found.buckets) / 2


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("without", [(), (SHARE,)], ids=["shared", "mirrored"])
def test_an_optimizer_that_runs_by_itself(num_devices: int, without: tuple[str, ...]) -> None:
    with compiled(num_devices, CountedSigns, disable=without, **SMALL) as step:
        for _ in range(3):
            step(**mlp_batch(7))
        found = step.explain()
        check(step, found, 2)
        per_bucket = 2 if without and num_devices > 1 else 1  # reduced, and then sent
        assert len(found.totals) == per_bucket * len(step.program.buckets)


def test_buffers_that_are_written_and_one_step_that_warmed_up() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    batch = mlp_batch(8)
    with compiled(2, model=model, **SMALL) as step:
        step(batch["x"], target=batch["target"])
        check(step, step.explain(), 1)
        for _ in range(2):
            step(batch["x"], target=batch["target"])
        check(step, step.explain(), 2)


@pytest.mark.fast
def test_waits_for_the_models_own_collectives_have_a_row_and_buckets_add_up_with_it() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.SyncBatchNorm(8), nn.Linear(8, 3)).double()
    batch = mlp_batch(8)
    with compiled(2, model=model) as step:
        for _ in range(2):
            step(batch["x"], target=batch["target"])
        found = step.explain()
    waits = [device.parts_ms["skew"] + device.parts_ms["transfer"] for device in found.devices]
    of_buckets = sum(total.exposed_ms for total in found.totals)
    assert found.meetings_ms > 0 and of_buckets + found.meetings_ms == pytest.approx(sum(waits) / 2)
    assert "\nmodel " in str(found) and "of the model itself" in " ".join(str(found).split())


def test_what_is_explained_is_the_program_that_trained_most() -> None:
    with compiled(2, **SMALL) as step:
        for _ in range(4):
            step(**mlp_batch(8))
        for _ in range(3):
            step(**mlp_batch(5))
        check(step, step.explain(), 3)
        assert step.explain(step.programs[-1]).num_steps == 2
        step(**mlp_batch(8))
    check(step, step.explain(), 4)  # it is closed


@pytest.mark.fast
def test_a_step_that_fails_leaves_no_record() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
    good, bad = torch.zeros(4, 2, dtype=torch.long), torch.full((4, 2), 99)
    target = torch.zeros(4, dtype=torch.long)
    with compiled(2, model=model) as step:
        with pytest.raises(ExecutionError, match="index"):
            step(bad, target=target)
        with pytest.raises(ExecutionError, match=r"each that began .* failed or was interrupted"):
            step.explain()
        for _ in range(2):
            step(good, target=target)
        with pytest.raises(ExecutionError, match="index"):
            step(bad, target=target)
        check(step, step.explain(), 1)
        step(good, target=target)
        check(step, step.explain(), 2)


def test_a_step_that_was_interrupted_leaves_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where every device finishes it: the only one does, as it waits for nobody."""
    with compiled(1) as step:
        for _ in range(2):
            step(**mlp_batch(8))
        assert step._runs.pool is not None
        wait, interrupts = step._runs.pool._await_a_result, [KeyboardInterrupt()]

        def interrupted_once(*args: Any) -> None:
            if interrupts:
                raise interrupts.pop()
            wait(*args)

        monkeypatch.setattr(step._runs.pool, "_await_a_result", interrupted_once)
        with pytest.raises(KeyboardInterrupt):
            step(**mlp_batch(8))
        check(step, step.explain(), 1)
        step(**mlp_batch(8))
        check(step, step.explain(), 2)


def test_before_the_first_step(tmp_path: Path) -> None:
    with compiled() as step:
        for ask in (step.explain, lambda: step.timeline(tmp_path / "trace.json")):
            with pytest.raises(
                ExecutionError, match=r"MC5005: no call was recorded, and a report needs one training call"
            ):
                ask()
        step.prepare(**mlp_batch(8))
        with pytest.raises(ExecutionError, match=r"MC5005: no call was recorded, and a report needs one training call"):
            step.explain()
        assert not list(tmp_path.iterdir())


def test_compiled_regions_have_source_lines(tmp_path: Path) -> None:
    with compiled(2, backend="inductor") as step:
        for _ in range(3):
            step(**mlp_batch(8))
        check(step, step.explain(), 2)
        events = json.loads(step.timeline(tmp_path / "trace.json").read_text())["traceEvents"]
    regions = [event for event in events if event["ph"] == "X" and event["cat"] in ("forward", "backward")]
    assert len(regions) == 3 * 2 * 2
    assert any("tiny_models.py" in event["args"].get("source", "") for event in regions)


# torch's profiler sees what the devices' threads do, by name and without options.


def profiled_step(devices: int = 2, **options: Any) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return sgd_step(model, devices, loss_fn=nn.functional.mse_loss, **options)


def train(step: Step) -> float:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 4, generator=generator), torch.randn(12, 2, generator=generator)
    return float(step(x, target=y))


def counts(profiled: profile) -> dict[str, int]:
    return {event.key: event.count for event in profiled.key_averages()}


@pytest.mark.parametrize("interleaves", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_regions_collectives_and_operators_of_all_devices_are_seen(devices: int, interleaves: bool) -> None:
    with profiled_step(devices) as step, profiled_step(devices) as other:
        assert train(step) == train(other)
        assert step._runs.last is not None
        step._runs.last.trial.interleaves = interleaves and devices > 1
        step._runs.last.trial.is_decided = True
        with profile() as profiled:
            loss = train(step)
        assert loss == train(other)
        found = counts(profiled)
        assert found["aten::addmm"] == 2 * devices and found["aten::tanh"] == devices
        for name in ("fwd_0", "bwd_0", *(["reduce_scatter b0"] if devices > 1 else [])):
            assert all(found[f"mirrorc::{name} cpu:{i}"] == 1 for i in range(devices)), name
        assert any(name.startswith("mirrorc::update b0 cpu:") for name in found)  # a small bucket is one device's share
        assert train(step) == train(other)
        with profile() as nothing:
            pass
        assert not counts(nothing)


@pytest.mark.fast
def test_a_step_that_fails_under_a_profiler_leaves_nothing_behind() -> None:
    x, bad = torch.ones(4, 4), torch.full((4, 4), torch.inf)
    with profiled_step(check_finite=True) as step:
        step(x, target=x[:, :2])
        assert step._runs.last is not None
        before = [dict(function.namespace) for function in step._runs.last.functions.whole]
        with profile(), pytest.raises(mirrorc.NonFiniteError):
            step(x, target=bad[:, :2])
        assert [dict(function.namespace) for function in step._runs.last.functions.whole] == before
        with profile() as profiled:
            step(x, target=x[:, :2])
        assert counts(profiled)["mirrorc::fwd_0 cpu:1"] == 1


@pytest.mark.fast
def test_the_profilers_schedule_and_trace_work_as_always(tmp_path: Any) -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
    with profiled_step() as step:
        with profile(schedule=schedule, record_shapes=True) as profiled:
            for _ in range(4):
                train(step)
                profiled.step()
        assert counts(profiled)["mirrorc::bwd_0 cpu:1"] == 2
        profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "mirrorc::bwd_0 cpu:1" in (tmp_path / "trace.json").read_text()
