"""What `mirrorc.Memory(shard_optimizer=True)` makes for a world of workers that is not there, and what it refuses."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_steps import step_of_world
from saved_programs import assert_same, reload
from torch import nn

import mirrorc
from mirrorc import World
from mirrorc.comparison.diff import diff_programs
from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program
from mirrorc.options.option import Request
from mirrorc.options.table import OPTIONS, grouped
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline

UNEVEN = World(3, (1, 2, 1))


def step_of(world: World | None = UNEVEN, rank: int = 1, **options: Any) -> mirrorc.Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    given = {"optimizer": optimizer, "loss_fn": nn.CrossEntropyLoss(), "shard_optimizer": True, "backend": "eager"}
    given = {**given, "buckets": ByBytes(0.0004, 0.0004), **options}
    if world is None:
        return mirrorc.compile(model, 2, **grouped(given))
    return step_of_world(model, world=world, rank=rank, **given)


def prepared(**options: Any) -> tuple[mirrorc.Step, Program]:
    step = step_of(**options)
    return step, step.prepare(torch.zeros(6, 5), target=torch.zeros(6, dtype=torch.int64))


@pytest.mark.slow
def test_all_workers_exchange_and_gather_the_same_whatever_their_devices() -> None:
    hashes = set()
    for rank in range(3):
        step, program = prepared(rank=rank)
        hashes.add(step.schedule_hash)
        for graph in (module.graph for module in program.device_graphs.values()):
            called = [node.target.__name__ for node in graph.nodes if node.op == "call_function"]  # type: ignore[union-attr]
            assert called.count("scatter_sums") == called.count("gather_parameters") == len(program.buckets) > 1
    assert len(hashes) == 1
    whole, _ = prepared(shard_optimizer=False)
    assert whole.schedule_hash not in hashes


@pytest.mark.slow
def test_memory_has_the_state_of_one_part() -> None:
    held = {}
    for is_sharded in (True, False):
        step, program = prepared(shard_optimizer=is_sharded, rank=0)
        (device,) = step.memory().devices
        held[is_sharded] = device.own.optimizer_state or 0
        numbers = 4 * (len(program.buckets) + 4)  # the count of steps, of each bucket, and shown for each parameter
        parts = 3 if is_sharded else 1
        assert held[is_sharded] == 2 * sum(b.num_bytes for b in program.buckets) // parts + numbers
    assert held[True] < 0.6 * held[False], "buckets are padded to parts of whole cache lines"


@pytest.mark.slow
def test_the_printed_program_says_whose_part_it_is_and_is_read_back(tmp_path: Path) -> None:
    _, program = prepared()
    text = program.to_text(fold=False)
    assert re.search(r"#   shares, of this worker's elements 384 … 767 of 1152: cpu:0 384 … 575, cpu:1 576 … 767", text)
    assert re.search(
        r"b2_part: share of f32\[1152\] += wait\(bucket=2, b2_scatter\) +# elements 384 … 575 of 1152", text
    )
    assert re.search(
        r"update\(bucket=2, b2_part\) +# AdamW group 0, worker 1's part of 3, this device's share of 2", text
    )
    assert re.search(r"gather_parameters\(bucket=2, link=gloo\) +# each of 3 workers has updated its part", text)
    assert "is waited for first" not in text
    assert_same(program, reload(program, tmp_path))
    _, whole = prepared(shard_optimizer=False)
    assert "scatter_sums" in diff_programs(whole, program)


@pytest.mark.slow
def test_a_process_on_its_own_deals_nothing_out() -> None:
    with step_of(world=None) as step:
        optimizer = step._options.optimizers.optimizers[0]
        for _ in range(2):
            step(torch.randn(6, 5), target=torch.zeros(6, dtype=torch.int64))
        assert "exp_avg" in optimizer.state_dict()["state"][0]
        step.gather_optimizer_state()
        assert all(bucket.part is None for bucket in step.program.buckets)


@pytest.mark.slow
def test_small_gradients_are_sent_whole() -> None:
    _, program = prepared(world=World(2), rank=0, exchange="auto")
    assert not any(bucket.is_sent_as_factors for bucket in program.buckets)
    assert not program.workers.sent_as_factors


@pytest.mark.slow
def test_factors_are_made_in_parts_also_by_workers_with_different_numbers_of_devices() -> None:
    schedules = set()
    for rank in range(3):
        step, program = prepared(rank=rank, exchange="factors")
        schedules.add(step.schedule_hash)
        assert set(program.workers.sent_as_factors) == {"0.weight", "2.weight"}
        assert all(bucket.part is not None for bucket in program.buckets)
        assert step.memory().total > 0
    assert len(schedules) == 1
    text = prepared(exchange="factors")[1].to_text(fold=False)
    assert re.search(
        r"gather_factors\(bucket=\d, \w+, op=sum, link=gloo\) +# those of 3 workers, one product or sum of all, of which each "
        "makes its part",
        text,
    )
    assert re.search(r"b\d_total: share of f32\[\d+\] += wait\(bucket=\d, b\d_factors\) +# elements \d+ … \d+ of", text)
    with pytest.raises(
        ValueError,
        match=r"(?s)different numbers of devices.*\n  fix:  .*, or let each make its part alone with shard_opt",
    ):
        step_of(exchange="factors", shard_optimizer=False)


def test_one_commit_point_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"early_update=False cannot be used with shard_optimizer=True\n  why:  .*promises not to"
    ):
        step_of(world=World(2), rank=0, early_update=False)


@pytest.mark.slow
def test_every_worker_has_the_norms_of_all_parts() -> None:
    for rank, parts in ((0, ["0 … 383"]), (1, ["384 … 575", "576 … 767"])):
        _, program = prepared(rank=rank, clip_grad_norm=1.0)
        text = program.to_text(fold=False)
        assert "all devices of all workers exchange the norms at the commit" in text
        assert all(f"# elements {part} of 1152" in text for part in parts)
        assert "met: f32[1, 4] " in text
        assert "= commit(norm)  " in text and "# norms of all 4 devices of 3 workers" in text
        assert "nothing stops" not in text and "only a lost connection may fail it" in text


@pytest.mark.slow
def test_what_is_not_finite_on_any_worker_ends_the_step() -> None:
    _, program = prepared(scaler=torch.amp.GradScaler("cpu"), clip_grad_norm=1.0)
    text = program.to_text(fold=False)
    assert (
        "-- unless all of this is finite on every device of all workers, the step ends here and returns its loss"
        in text
    )
    assert "loss_is_finite" not in text and "= aten.div.Tensor(met_norm, loss_scale)" in text


def test_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="shard_optimizer=True cannot be used on devices of the type 'cuda' yet"):
        asked = {**OPTIONS.defaults, "shard_optimizer": True}
        OPTIONS.check_exclusions(Request(asked, World(2).worker(0), (Device("cuda:0", torch.device("cuda:0")),)))


@pytest.mark.slow
def test_a_pipeline_without_the_pass_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the pass 'shard-optimizer', which disable= switches off"):
        step_of(disable=("shard-optimizer",))
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    given = {"optimizer": torch.optim.AdamW(model.parameters()), "loss_fn": nn.CrossEntropyLoss(), "backend": "eager"}
    given |= {"world": UNEVEN, "shard_optimizer": True}
    with pytest.raises(
        ValueError, match=r"and passes= cannot be combined\n.*\n  fix:  put mirrorc.passes.ShardOptimizer\(\)"
    ):
        step_of_world(model, passes=default_pipeline(over_workers=True), **given)
    passes = default_pipeline(over_workers=True, shard_optimizer=True)
    program = step_of_world(model, passes=passes, **given).prepare(
        torch.zeros(6, 5), target=torch.zeros(6, dtype=torch.int64)
    )
    assert all(bucket.part is not None for bucket in program.buckets)
