import functools
import re
from collections import OrderedDict

import pytest
import torch
from tiny_models import make_mlp
from tiny_programs import captured_model, captured_two_layers, every_stage, handmade
from torch import nn
from torch.testing import FileCheck

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes

TWO_BUCKETS = {"buckets": ByBytes(1.0, 0.005)}


@functools.cache
def stages(num_devices: int) -> dict[str, Program]:
    """Two layers, of which every device has a share in both buckets; on three devices, shards of 3, 3 and 2 examples."""
    torch.manual_seed(0)
    layers = OrderedDict(fc1=nn.Linear(16, 64), relu=nn.ReLU(), fc2=nn.Linear(64, 16))
    return every_stage(captured_model(nn.Sequential(layers), num_devices, 8, columns=16), **TWO_BUCKETS)


def uneven() -> Program:
    return stages(3)["lower-devices"]


@pytest.mark.slow
def test_examples_and_loss_weights_are_those_of_the_batch() -> None:
    FileCheck().check("# cpu:0, cpu:1 (replicas 0, 1) run this on 3 of the batch's 8 examples each").check_next(
        "#   examples by their place in the batch, from 0: cpu:0 0 … 2, cpu:1 3 … 5"
    ).check_next("#   loss_weight = 3/8, its part of the batch: backward begins with it").check_next(
        "def cpu_0(x: f32[3, 16], target: i64[3], loss_weight: f32[]):"
    ).check("# cpu:2 (replica 2) runs this on 2 of the batch's 8 examples").check_next("cpu:2 6 … 7").check_next(
        "#   loss_weight = 2/8"
    ).check_next("def cpu_2(x: f32[2, 16], target: i64[2], loss_weight: f32[]):  # as cpu_0, but for these lines").run(
        uneven().to_text()
    )


def test_every_stage_says_who_runs_what() -> None:
    for name, program in stages(3).items():
        text = program.to_text()
        assert "(replicas 0, 1) run this on 3 of" in text and "(replica 2) runs this on 2 of" in text, name


def test_a_loss_that_is_a_sum_has_the_weight_one() -> None:
    text = uneven().evolve(loss_reduction="sum").to_text()
    assert (
        text.count("#   loss_weight = 1: the loss is a sum over examples") == 1
        and text.count("#   loss_weight = 1\n") == 1
    )


@pytest.mark.slow
def test_random_streams_are_told_where_there_are_any() -> None:
    program = captured_model(make_mlp(torch.float32, dropout=0.5), 2, columns=6)
    assert "seed" in [argument.kind for argument in program.arguments]
    assert "#   seed = mix(seed of the step, number of the replica): each replica draws" in program.to_text()
    assert "seed = mix" not in uneven().to_text()


def test_of_the_second_shape_only_what_differs_is_printed() -> None:
    text = uneven().to_text()
    second = text[text.index("def cpu_2(") :]
    operations = re.findall(r"= ([\w.]+)\(", second)
    assert operations and all(operation.endswith(".shard1") for operation in operations), operations
    whole = uneven().to_text(fold=False)
    assert whole.count("= wait(") == 2 * text.count("= wait(") > 0


@pytest.mark.slow
def test_the_line_from_which_parameters_may_be_written_says_so_and_why() -> None:
    for name, program in stages(2).items():
        lines = program.to_text(fold=False).splitlines()
        first = next((i for i, line in enumerate(lines) if " -- parameters may be written from here on" in line), None)
        assert (first is not None) == any(True for graph in program.graphs() for _ in calls_to(graph, ops.update)), name
        before = [line for line in lines[: first or 0] if "update(" in line]
        assert not before, (name, before)
    text = stages(2)["lower-devices"].to_text()
    FileCheck().check(
        "commit waits until all devices are done with backward; a failure before it changes nothing, and behind it nothing stops"
    ).check_next("commit()").check_next("the bucket that was launched last is waited for first").check_next(
        "wait(bucket=1"
    ).run(text)
    mirrored = stages(2)["schedule-overlap"].to_text()
    FileCheck().check("all devices are done with backward").check_next("commit()").check("update(bucket=0").run(
        mirrored
    )


@pytest.mark.slow
def test_a_wait_says_which_part_of_the_bucket_it_gives_and_the_table_those_of_all() -> None:
    program = every_stage(captured_two_layers(2))["lower-devices"]
    (bucket,) = program.buckets
    shares = [bucket.share(replica, 2) for replica in range(2)]
    text = program.to_text()
    first, last = shares[0][0], shares[0][1] - 1
    assert f"# elements {first} … {last} of {bucket.num_elements} on cpu:0, others: see bucket 0" in text
    parts = ", ".join(f"cpu:{i} {start} … {stop - 1}" for i, (start, stop) in enumerate(shares))
    assert f"#   shares, of elements 0 … {bucket.num_elements - 1}: {parts}" in text
    assert "elements" not in every_stage(captured_two_layers(2))["schedule-overlap"].to_text().partition("def ")[2]


@pytest.mark.slow
def test_factors_and_places_of_gradients_are_told() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3))
    program = run_passes(captured_model(model, 2, 8, columns=40), default_pipeline(min_factored_elements=0))
    FileCheck().check("at the wait each device makes its own share of it").check_next("d(0.weight)").check_same(
        "# f32[30, 4] @ f32[4, 40], made by shares at the wait"
    ).check("pack(bucket=0").check_same("# 3 in place, 0 copied, 1 factored").run(program.to_text())
    whole = every_stage(handmade(2))["pack-gradients"].to_text()
    assert "# 2 in place" in whole


def test_regions_say_what_they_cover() -> None:
    text = uneven().to_text()
    assert "# forward of fc1 … fc2 and the loss" in text and "# backward of the loss, fc2" in text


@pytest.mark.slow
def test_hyperparameters_are_those_at_compilation_and_no_part_of_the_plan() -> None:
    program = captured_two_layers(2)
    assert dict(program.optimizer_groups) == {"SGD group 0": "lr=0.1, momentum=0, dampening=0, weight_decay=0"}
    lowered = every_stage(program)["lower-devices"]
    held = "# optimizer SGD group 0: lr=0.1, momentum=0, dampening=0, weight_decay=0 (at compilation"
    assert held in lowered.to_text()
    other = every_stage(program.evolve(optimizer_groups={"SGD group 0": "lr=0.2"}))
    assert other["lower-devices"].buckets == lowered.buckets
