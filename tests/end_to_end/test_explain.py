"""`Step.explain` and `Step.timeline` on real runs: figures hold together whatever the machine does meanwhile."""

from __future__ import annotations

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
from torch import nn
from twins import compiled_step

import mirrorc
from mirrorc import ExecutionError
from mirrorc.packing import ByBytes
from mirrorc.runtime.profiling.explanation import Explanation

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_buffers_that_are_written_and_one_step_that_warmed_up() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
    batch = mlp_batch(8)
    with compiled(2, model=model, **SMALL) as step:
        step(batch["x"], target=batch["target"])
        check(step, step.explain(), 1)
        for _ in range(2):
            step(batch["x"], target=batch["target"])
        check(step, step.explain(), 2)


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_compiled_regions_have_source_lines(tmp_path: Path) -> None:
    with compiled(2, backend="inductor") as step:
        for _ in range(3):
            step(**mlp_batch(8))
        check(step, step.explain(), 2)
        events = json.loads(step.timeline(tmp_path / "trace.json").read_text())["traceEvents"]
    regions = [event for event in events if event["ph"] == "X" and event["cat"] in ("forward", "backward")]
    assert len(regions) == 3 * 2 * 2
    assert any("tiny_models.py" in event["args"].get("source", "") for event in regions)
