"""torch's profiler sees what the devices' threads do, by name and without options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_programs import sgd_step
from torch import nn
from torch.profiler import profile

import mirrorc
from mirrorc.step import Step


def compiled(devices: int = 2, **options: Any) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return sgd_step(model, devices, loss_fn=nn.functional.mse_loss, **options)


def train(step: Step) -> float:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 4, generator=generator), torch.randn(12, 2, generator=generator)
    return float(step(x, target=y))


def counts(profiled: profile) -> dict[str, int]:
    return {event.key: event.count for event in profiled.key_averages()}


@pytest.mark.slow
@pytest.mark.parametrize("interleaves", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_regions_collectives_and_operators_of_all_devices_are_seen(devices: int, interleaves: bool) -> None:
    with compiled(devices) as step, compiled(devices) as other:
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


def test_a_step_that_fails_under_a_profiler_leaves_nothing_behind() -> None:
    x, bad = torch.ones(4, 4), torch.full((4, 4), torch.inf)
    with compiled(check_finite=True) as step:
        step(x, target=x[:, :2])
        assert step._runs.last is not None
        before = [dict(function.namespace) for function in step._runs.last.functions.whole]
        with profile(), pytest.raises(mirrorc.NonFiniteError):
            step(x, target=bad[:, :2])
        assert [dict(function.namespace) for function in step._runs.last.functions.whole] == before
        with profile() as profiled:
            step(x, target=x[:, :2])
        assert counts(profiled)["mirrorc::fwd_0 cpu:1"] == 1


def test_the_profilers_schedule_and_trace_work_as_always(tmp_path: Any) -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
    with compiled() as step:
        with profile(schedule=schedule, record_shapes=True) as profiled:
            for _ in range(4):
                train(step)
                profiled.step()
        assert counts(profiled)["mirrorc::bwd_0 cpu:1"] == 2
        profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "mirrorc::bwd_0 cpu:1" in (tmp_path / "trace.json").read_text()
