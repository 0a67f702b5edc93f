"""What is compiled for a world of workers that is not there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden_programs import MODELS, WORKER, golden_program, worker_text
from planned_steps import step_of_world
from saved_programs import assert_same, reload
from tiny_programs import SMALL_BUCKETS, every_stage, handmade_of_worker
from torch import nn

import mirrorc
from mirrorc import World
from mirrorc.comparison.diff import diff_programs
from mirrorc.errors import ExecutionError, PassError
from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program
from mirrorc.options.step_options import joined_workers
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes
from mirrorc.verifier.verifier import verify

UNEVEN = World(3, (1, 2, 1))


def compiled(world: World = UNEVEN, rank: int = 1, model: nn.Module | None = None, **options: Any) -> mirrorc.Step:
    model = model or nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"optimizer": optimizer, "loss_fn": F.cross_entropy, "backend": "eager", **options}
    return step_of_world(model, world=world, rank=rank, **given)


def batch(num_examples: int = 8) -> dict[str, torch.Tensor]:
    return {"input": torch.zeros(num_examples, 4), "target": torch.zeros(num_examples, dtype=torch.int64)}


def worker(rank: int = 1, world: World = UNEVEN, **options: Any) -> dict[str, Program]:
    captured = handmade_of_worker(world, rank, buffer=True)
    return every_stage(captured, over_workers=True, **SMALL_BUCKETS, **options)


@pytest.mark.slow
def test_the_program_of_one_worker_is_compiled_where_no_other_is() -> None:
    with compiled() as step:
        program = step.prepare(**batch())
        first, second = str(program).splitlines()[:2]
        assert first == "# mirrorc · stage LOWERED · 2 devices · 1 bucket · worker 1 of 3, replicas 1 … 2 of 4"
        schedule = f"all exchange the same in the same order, schedule {step.schedule_hash[:16]}"
        told = "workers 0, 2 have 1 device, worker 1 has 2 devices; each runs the program of its devices, on examples of its own"
        assert second == f"# workers: {told}; {schedule}"
        assert "# cpu:0, cpu:1 (replicas 1, 2) run this on 4 of this worker's 8 examples each" in str(program)
        assert "loss_weight = 4/(examples of all 3 workers in this step), its part of all examples" in str(program)
        assert step.memory().total > 0 and "on cpu:0, cpu:1 of worker 1 of 3" in repr(step)
    assert [step.program.num_replicas, step.program.num_examples] == [2, (4, 4)]


@pytest.mark.slow
def test_compile_makes_the_golden_program() -> None:
    golden = MODELS["digits"]
    model = golden.make().train()
    options = {"loss_fn": golden.loss_fn, "optimizer": golden.optimizer(model), **golden.buckets}
    with compiled(model=model, **options) as step:
        program = step.prepare(**golden.inputs(golden.num_examples(2)))
    lines = program.to_text(slots=True, sources=False).splitlines()
    facts = [
        line for line in lines if line.startswith(("# remark: buffers norm1.", "# remark: norm1 and norm2 normalize"))
    ]
    assert [line for line in lines if line not in facts] == worker_text().splitlines(), WORKER


@pytest.mark.slow
def test_early_updates_are_said_and_can_be_left_out() -> None:
    with compiled() as step:
        text = str(step.prepare(**batch()))
    assert "they commit when all have launched everything, and update each bucket when its sum is there" in text
    with compiled(early_update=False) as step:
        late = str(step.prepare(**batch()))
    assert "because another worker may be gone (early_update=False)" in late and "early=True" not in late
    assert (
        text.index("    commit(early=True)") < text.index("wait(bucket=0, b0_exchange)") < text.index("update(bucket=0")
    )
    assert late.index("wait(bucket=0, b0_exchange)") < late.index("    commit()") < late.index("update(bucket=0")
    with compiled(clip_grad_norm=1.0, world=World(2, 2)) as step:
        assert "waited for before the commit, because clip_grad_norm needs them" in str(step.prepare(**batch()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "world", "options", "cap"),
    [
        (["cpu:0"], World(2), {}, 4.0),
        (["cpu:0", "cpu:1"], World(3, 2), {"order": "reversed", "buckets": "auto"}, 4.0),
        (["cpu:0"], World(2), {"buckets": 25.0}, 25.0),
        (["cpu:0"], World(2), {"buckets": ByBytes(7.0)}, 7.0),
        (["cpu:0"], World(2), {"buckets": ByBytes()}, 25.0),
        (["cpu:0", "cpu:1"], None, {}, 25.0),
        (["cpu:0"], None, {"buckets": "auto"}, 25.0),
    ],
)
def test_buckets_are_smaller_over_several_workers(
    devices: list[str], world: World | None, options: dict[str, Any], cap: float
) -> None:
    """A cap is told where it cuts: two matrices of 1 MiB do not both fit into the first bucket."""
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"optimizer": optimizer, "loss_fn": F.mse_loss, "backend": "eager", **options}
    batch = {"input": torch.zeros(4, 512), "target": torch.zeros(4, 512)}
    program = mirrorc.plan(model, batch, devices, world=world, **grouped(given))
    assert f"over {cap:g} MiB (bucket 0: 1 MiB) opens the next" in str(program)


@pytest.mark.slow
def test_all_workers_exchange_the_same_whatever_their_devices() -> None:
    hashes = set()
    for rank, num_examples in enumerate((4, 6, 2)):
        with compiled(rank=rank) as step:
            step.prepare(**batch(num_examples))
            hashes.add(step.schedule_hash)
    assert len(hashes) == 1 and re.fullmatch("[0-9a-f]{64}", hashes.pop())


def test_workers_that_are_alike_have_one_program_but_for_their_numbers() -> None:
    old, new = (golden_program("digits", 2, workers=World(64, 2).worker(rank)) for rank in (0, 3))
    found = diff_programs(old, new)
    assert "· worker 0 of 64, replicas 0 … 1 of 128" in found and "· worker 3 of 64, replicas 6 … 7 of 128" in found
    assert (
        new.to_text().splitlines()[1].startswith("# workers: all 64 have 2 devices and run this program, on examples")
    )
    one, other = (
        re.sub(r"worker \d+ of 64, replicas \S+ … \S+|\(replicas \S+ \S+\)", "", p.to_text()) for p in (old, new)
    )
    assert one == other


@pytest.mark.slow
def test_a_comparison_tells_workers_from_a_process_on_its_own() -> None:
    alone, other = golden_program("digits", 2), golden_program("digits", 2, workers=World(2, 2).worker(0))
    assert "\n+# workers: all 2 have 2 devices" in diff_programs(alone, other)
    more = golden_program("digits", 2, workers=World(3, 2).worker(0))
    assert "\n+# workers: all 3 have 2 devices" in diff_programs(other, more)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_programs_of_every_stage_are_read_and_loaded_again(rank: int, tmp_path: Path) -> None:
    for name, program in worker(rank, max_grad_value=1.0).items():
        for fold in (True, False):
            heading, workers, *_ = program.to_text(fold=fold).split("\n")
            assert f" · worker {rank} of 3, replica" in heading, name
            assert workers.startswith("# workers: workers 0, 2 have 1 device, worker 1 has 2 devices; each runs"), name
        loaded = reload(program, tmp_path)
        assert_same(loaded, program)
        verify(loaded)


@pytest.mark.slow
def test_a_dump_has_the_program_of_the_worker_after_each_pass(tmp_path: Path) -> None:
    with compiled(dump=tmp_path) as step:
        step.prepare(**batch())
        (file,) = (tmp_path / "program-0").glob("*-reduce-over-workers.txt")
    heading = file.read_text(encoding="utf-8").partition("\n")[0]
    assert "· after reduce-over-workers ·" in heading and "· worker 1 of 3, replicas 1 … 2 of 4" in heading


@pytest.mark.slow
def test_a_scaler_and_equal_workers_norms_are_compiled() -> None:
    scaler = torch.amp.GradScaler("cpu")
    options = {"scaler": scaler, "clip_grad_norm": 1.0, "microbatches": 2, "return_outputs": True}
    with compiled(World(2, 2), **options) as step:
        text = str(step.prepare(**batch()))
    assert "b0_total_norm: f32[]" in text and "otherwise=skip" in text
    assert re.search(r"update\(bucket=0, b0_total, \w+\)", text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 3}, "rank is 3, but the world has 3 workers"),
        ({"devices": ["cpu:0"]}, "devices= lists 1 device, but worker 1 of the World has 2"),
        ({"cuda_graphs": True}, "cuda_graphs=True"),
        (
            {"disable": ["share-parameters"]},
            "this worker, one of several, has 2 devices, and disable= leaves out 'share-parameters'\n  why:  they need to share",
        ),
    ],
)
def test_what_several_workers_cannot_do_yet_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compiled(**options)


@pytest.mark.slow
@pytest.mark.parametrize("world", [World(2), World(2, 2)])
def test_what_looks_at_all_workers_is_compiled(world: World, tmp_path: Path) -> None:
    """An optimizer that runs by itself takes sums over all workers, whose norm and finiteness are known before the commit."""
    programs, hashes = [], set()
    for rank in range(2):
        model = nn.Linear(4, 3)
        asked = {"check_finite": True, "clip_grad_norm": 1.0, "check_replicas_every": 2}
        with compiled(world, rank, model, optimizer=torch.optim.Adafactor(model.parameters()), **asked) as step:
            programs.append(step.prepare(**batch()))
            hashes.add(step.schedule_hash)
    assert len(hashes) == 1
    program = programs[1]
    assert f" · worker 1 of {world.num_workers}, replica" in program.to_text().partition("\n")[0]
    loaded = reload(program, tmp_path)
    assert_same(loaded, program)
    verify(loaded)
    (optimizer,) = [node for graph in program.graphs() for node in graph.nodes if node.target is ops.step_optimizer]
    for scaled in optimizer.args:
        total = scaled.all_input_nodes[0]
        assert (scaled.target, total.all_input_nodes[0].target) == (ops.scale, ops.exchange)
    remark = "every worker runs Adafactor group 0 by itself, from the same sums and the same stream of random numbers"
    assert any(remark in one.text for one in program.remarks)


@pytest.mark.slow
def test_a_step_without_other_workers_has_no_schedule() -> None:
    with compiled(World(1, 2), rank=0) as step:
        assert "worker" not in str(step.prepare(**batch())).splitlines()[0]
        with pytest.raises(ExecutionError, match="there is no worker besides this one"):
            assert step.schedule_hash


@pytest.mark.parametrize(
    ("world", "told"),
    [
        (World(2), "all 2 have 1 device and run this program, on examples of their own"),
        (World(60, (1, 2) * 30), "30 workers have 1 device, 30 workers have 2 devices; each runs"),
        (World(8, [1] * 6 + [2] * 2), "workers 0 … 5 have 1 device, workers 6, 7 have 2 devices; each runs"),
        (
            World(6, (1, 2, 3, 4, 5, 6)),
            "worker 0 has 1 device, worker 1 has 2 devices, worker 2 has 3 devices, worker 3 has 4 devices, others have more",
        ),
    ],
)
def test_a_line_tells_what_other_workers_have(world: World, told: str) -> None:
    assert worker(0, world)["plan-buckets"].to_text().splitlines()[1].startswith(f"# workers: {told}")


class SaidAlready:
    rank, workers = 0, ("worker 0", "worker 1", "worker 2")

    def __init__(self, *others: str) -> None:
        self._others = others

    def all_say(self, text: str, *, timeout_seconds: float) -> list[str]:
        return [text, *self._others]


def test_workers_join_with_a_gpu_each() -> None:
    gpu, others = Device("cuda:0", torch.device("cuda", 0)), ("1 cuda", "1 cuda")
    found = joined_workers(SaidAlready(*others), [gpu], 1.0)  # type: ignore[arg-type]
    assert found.devices_per_worker == (1, 1, 1)
    cpus = [Device(f"cpu:{i}", torch.device("cpu")) for i in range(2)]
    assert joined_workers(SaidAlready("1 cpu", "3 cpu"), cpus, 1.0).devices_per_worker == (2, 1, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("names", "others", "reason"),
    [
        (["cuda:0"], ["1 cuda", "2 cpu"], "worker 0 are 'cuda', those of worker 2 'cpu', and nothing"),
        (
            ["cuda:0"],
            ["4 cuda", "1 cuda"],
            r"(?s)worker 1 has 4 GPUs, and may have one.*torchrun --nproc-per-node=gpu.*local_rank",
        ),
        (["cuda:0", "cuda:0/1"], ["1 cuda", "1 cuda"], "worker 0 has 2 GPUs, and may have one"),
    ],
)
def test_devices_that_cannot_work_together_are_refused_by_all(names: list[str], others: list[str], reason: str) -> None:
    devices = [Device(name, torch.device("cuda", 0)) for name in names]
    with pytest.raises(ValueError, match=reason):
        joined_workers(SaidAlready(*others), devices, 1.0)  # type: ignore[arg-type]


@pytest.mark.slow
def test_norms_over_unlike_workers_are_exchanged_by_all() -> None:
    """Also by a worker with one device, which otherwise measures by itself; whole gradients cannot be measured so."""
    for rank in range(2):
        with compiled(rank=rank, clip_grad_norm=1.0) as step:
            program = step.prepare(**batch())
            for graph in program.graphs():
                (commit,) = [node for node in graph.nodes if node.target is ops.commit]
                assert [operand.target for operand in commit.args] == [ops.norm]
            assert any(one.text.endswith("all workers go on with worker 0's") for one in program.remarks)
    model = nn.Linear(4, 3)
    said, optimizer = (
        "MC1504: clip_grad_norm cannot bound the gradients of Adafactor group 0",
        torch.optim.Adafactor(model.parameters()),
    )
    with compiled(model=model, optimizer=optimizer, clip_grad_norm=1.0) as step, pytest.raises(PassError, match=said):
        step.prepare(**batch())
