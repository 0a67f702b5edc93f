"""What `mirrorc.compile(overlap_next_step=True)` makes for a world that is not there, and what it refuses."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_programs import assert_same, reload
from torch import nn

import mirrorc
from mirrorc import World
from mirrorc.ir import ops
from mirrorc.ir.devices import parse_devices
from mirrorc.ir.nodes import calls_to, pack_of
from mirrorc.ir.program import Program
from mirrorc.ir.workers import Workers
from mirrorc.options.overlap import check_overlap, plan_of_next_step, why_not_by_need
from mirrorc.passes import default_pipeline
from mirrorc.printing.reader import read_program_text
from mirrorc.runtime.codegen.backends import backend_named


def step_of(**options: Any) -> mirrorc.Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 4))
    given = {"world": World(2), "overlap_next_step": True, "backend": "eager", "bucket_cap_mb": 0.01, **options}
    return mirrorc.compile(
        model, optimizer=torch.optim.AdamW(model.parameters()), loss_fn=nn.CrossEntropyLoss(), **given
    )


def prepared(**options: Any) -> Program:
    return step_of(**options).prepare(torch.zeros(6, 5), target=torch.zeros(6, dtype=torch.int64))


def test_the_printed_program_says_what_is_left_and_where_it_is_awaited_and_is_read_back(tmp_path: Path) -> None:
    program = prepared()
    text = program.to_text(fold=False)
    assert re.search(r"await_update\(bucket=\d\)", text) and "hand_over()" in text
    assert "overlap-next-step: a step returns while bucket" in text
    assert "what mirrorc does not see needs step.synchronize() first: direct reads and copies" in text
    read_program_text(program.to_text(slots=True, sources=False))
    assert_same(program, reload(program, tmp_path))


def test_regions_stay_as_they_are_where_a_cut_would_round_otherwise() -> None:
    assert not backend_named("inductor").preferences(torch.device("cpu"))["cuts_for_next_step"]
    names = {}
    for overlaps in (True, False):
        given = {"over_workers": True, "overlap_next_step": overlaps, "cuts_for_next_step": False}
        passes = default_pipeline(bucket_cap_mb=0.01, **given)
        program = prepared(passes=passes, overlap_next_step=overlaps, bucket_cap_mb=None)
        names[overlaps] = (program.buckets, [str(region.graph_module.graph) for region in program.regions.values()])
        assert ("hand_over()" in str(program)) == overlaps
    assert names[True] == names[False]
    assert len(prepared().regions) > len(names[True][1])


def test_workers_of_all_sizes_exchange_in_one_order() -> None:
    world = World(3, (1, 2, 1))
    steps = [step_of(world=world, rank=rank) for rank in range(3)]
    for step in steps:
        step.prepare(torch.zeros(6, 5), target=torch.zeros(6, dtype=torch.int64))
    assert len({step.schedule_hash for step in steps}) == 1


def test_memory_is_told() -> None:
    step = step_of()
    step.prepare(torch.zeros(6, 5), target=torch.zeros(6, dtype=torch.int64))
    assert step.memory().devices[0].own.parameters


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("clip_grad_norm", 1.0, "it needs all sums before the first update"),
        ("check_finite", "skip", "it needs all sums before the first update"),
        ("check_replicas_every", 5, "it reads all parameters before a step begins"),
        ("early_update", False, "no bucket is updated before all sums are there then"),
    ],
)
def test_what_needs_all_sums_is_refused(option: str, value: Any, why: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{option}= as it is given cannot be used with overlap_next_step=True: .*{why}"
    ):
        step_of(**{option: value})


def test_a_scaler_and_chosen_sizes_are_refused() -> None:
    plain = {
        "overlap_next_step": True,
        "passes": None,
        "disable_passes": (),
        "early_update": True,
        "clip_grad_norm": None,
        "scaler": None,
        "check_finite": False,
        "check_replicas_every": 0,
        "packing": None,
        "gradient_order": "ready",
    }
    workers, devices = Workers((1, 1), 0), parse_devices(1)
    check_overlap(workers, devices, plain)
    with pytest.raises(ValueError, match="scaler= as it is given cannot be used with overlap_next_step=True"):
        check_overlap(workers, devices, {**plain, "scaler": torch.amp.GradScaler("cpu")})


def test_devices_on_which_it_was_not_tried_are_refused() -> None:
    class Gpu:
        torch_device = torch.device("cuda", 0)

    asked = {"overlap_next_step": True, "passes": None, "disable_passes": ()}
    with pytest.raises(ValueError, match="cannot be used on devices of the type 'cuda' yet"):
        check_overlap(Workers((1, 1), 0), [Gpu()], asked)  # type: ignore[list-item]


def test_a_pipeline_without_the_pass_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"which the pipeline given with passes= has not: put mirrorc.passes.OverlapNextStep"
    ):
        step_of(passes=default_pipeline(over_workers=True), bucket_cap_mb=None)
    with pytest.raises(ValueError, match="which disable_passes leaves out"):
        step_of(disable_passes=("overlap-next-step",))


def test_a_process_on_its_own_has_nothing_in_flight() -> None:
    model = nn.Linear(5, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mirrorc.compile(
        model, 2, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss(), overlap_next_step=True, backend="eager"
    ) as step:
        before = copy.deepcopy(model.state_dict())
        step(torch.ones(4, 5), target=torch.zeros(4, dtype=torch.int64))
        assert not torch.equal(copy.deepcopy(model).weight, before["weight"])
        step.synchronize()
        assert any(
            str(remark).startswith("overlap-next-step: nothing to hand over: there is one worker")
            for remark in step.program.remarks
        )


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_buckets_by_need_are_launched_in_their_order_whichever_is_complete_first(
    num_devices: int, microbatches: int
) -> None:
    """Backward makes the gradient of the first bias last, though its bucket is not numbered last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 400, bias=False))
    step = mirrorc.compile(
        model,
        ["cpu:0", "cpu:1"][:num_devices],
        optimizer=torch.optim.AdamW(model.parameters()),
        loss_fn=nn.CrossEntropyLoss(),
        world=World(2, num_devices),
        overlap_next_step=True,
        backend="eager",
        exchange="dense",
        bucket_cap_mb=0.0005,
        microbatches=microbatches,
    )
    program = step.prepare(torch.zeros(8, 5), target=torch.zeros(8, dtype=torch.int64))
    for graph in program.graphs():
        launched = [pack_of(node) for node in calls_to(graph, ops.exchange)]
        assert launched == sorted(launched) and len(launched) > 2
    assert any(bucket.is_cut for bucket in program.buckets) == (num_devices == 1), "several devices gather its factors"


@pytest.mark.parametrize(
    ("devices_per_worker", "backend", "plans", "packs"),
    [
        ((1, 1), "eager", True, True),
        ((1, 2), "eager", True, False),
        ((1, 1, 1), "eager", False, False),
        ((1, 1, 1), "inductor", False, False),
    ],
)
def test_buckets_are_planned_by_need_where_that_keeps_the_bits(
    devices_per_worker: tuple[int, ...], backend: str, plans: bool, packs: bool
) -> None:
    workers = World(len(devices_per_worker), devices_per_worker).worker(0)
    assert plan_of_next_step(workers) == {"plans_for_next_step": plans, "packs_for_next_step": packs}
    why = why_not_by_need(workers, backend_named(backend).preferences(torch.device("cpu")))
    assert ("3 workers add up an element in an order that depends on its place" in why) == (
        not plans and backend == "eager"
    )


def test_a_remark_says_that_three_workers_keep_their_buckets() -> None:
    given = {"world": World(3), "bucket_cap_mb": 0.01}
    overlapped, waiting = prepared(**given), prepared(**given, overlap_next_step=False)
    assert "overlap_next_step: buckets are planned as without it" in str(overlapped)
    assert overlapped.buckets == waiting.buckets
    assert "are planned as without it" not in str(prepared()) + str(waiting)
