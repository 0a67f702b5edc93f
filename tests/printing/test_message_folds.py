"""Messages that sum up buckets: the names of their values, the table of rounds, and the lines that stand for them."""

import re

import pytest
import torch
from selections import slow_but
from summed_by_messages import linked, linked_by_shares
from tiny_programs import captured_model, targets
from torch import nn

from mirrorc.all_reduce_algorithms import AllReduceAlgorithm, HalvingDoubling, HierarchicalCopy, ReduceToOne, Ring, Tree
from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.ir.routes import route_of
from mirrorc.packing import ByBytes
from mirrorc.passes import LowerDevices, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.printing.bucket_names import BucketNames

ALGORITHMS = [Ring(), Tree(), ReduceToOne(), HalvingDoubling(), HierarchicalCopy(), ReduceToOne(dtype=torch.float64)]
_TABLE = re.compile(r"^# messages of (.*), by replicas; .*\n((?:#   .*\n)+)", re.MULTILINE)
_FOLD = re.compile(r"… messages of \S+, rounds? .* \((\d+) lines\)")


def function_of(text: str, name: str) -> list[str]:
    lines = text.partition(f"def {name}(")[2].partition("\n\n")[0].splitlines()[1:]
    return [line for line in lines if not line.startswith("    # -- ")]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("num_devices", slow_but([3], range(2, 6)))
def test_the_table_has_every_message_and_a_line_stands_for_its_lines(
    algorithm: AllReduceAlgorithm, num_devices: int
) -> None:
    for make in (linked, linked_by_shares):
        program = LowerDevices().run(algorithm.run(make(num_devices, 1, 64 * num_devices)))
        short, whole = program.to_text(), program.to_text(fold=False)
        sends = [node for module in program.device_graphs.values() for node in targets(module.graph, ops.send)]
        listed = [
            (unit, int(number), int(source), int(destination))
            for units, rounds in _TABLE.findall(short)
            for unit in units.split(", ")
            for number, messages in re.findall(r"round (\d+), [a-z ]+: (.*)", rounds)
            for source, destination in re.findall(r"(\d+)→(\d+)", messages)
        ]
        routes = [route_of(program, send) for send in sends]
        assert sorted(listed) == sorted((f"b{r.bucket}", r.round, r.source, r.destination) for r in routes)
        assert "… messages" not in whole and "# messages of" not in whole
        lines, all_lines = function_of(short, "cpu_0"), function_of(whole, "cpu_0")
        counts = [int(match[1]) for line in lines if (match := _FOLD.search(line))]
        assert len(lines) - len(counts) + sum(counts) == len(all_lines)


def test_values_are_named_by_chunks_and_by_what_they_sum_up() -> None:
    program = LowerDevices().run(Ring().run(linked(3, 300)))
    body = [line.partition(":")[0].strip() for line in function_of(program.to_text(fold=False), "cpu_1")]
    assert [line for line in body if line.startswith("b0")] == [
        "b0", "b0_c0_own", "b0_c2_incoming", "b0_c2_own", "b0_c1_own", "b0_c2_received", "b0_c2_partial", "b0_c1_incoming",
        "b0_c1_received", "b0_c1_sum", "b0_c0_sum_incoming", "b0_c2_sum_incoming", "b0_c0_sum", "b0_c2_sum", "b0_sum",
    ]  # fmt: skip
    folded = function_of(program.to_text(), "cpu_0")
    assert [" ".join(line.split()) for line in folded if "b0" in line and "pack(" not in line] == [
        "… messages of b0, round 0 (5 lines)",
        "b0_sum: f32[304] = … messages of b0, rounds 1 … 3 (13 lines)",
        "update(bucket=0, b0_sum) # AdamW group 0",
    ]


def test_overlapping_chunks_are_named_by_elements() -> None:
    names = BucketNames(program := HalvingDoubling().run(linked(4, 64)))
    found = {names.of(node) for node in program.mirrored_graph.nodes}
    assert {"b0_0_32_own", "b0_0_32_received", "b0_0_16_sum", "b0_sum"} <= found


def test_long_rounds_are_cut() -> None:
    text = HierarchicalCopy(groups=12).run(linked(24, 64)).to_text()
    assert "and 116 more" in text and max(map(len, text.splitlines())) < 300


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_a_share_is_called_so_on_every_device(algorithm: AllReduceAlgorithm) -> None:
    program = LowerDevices().run(algorithm.run(linked_by_shares(4, 300)))
    for text in (program.to_text(), program.to_text(fold=False)):
        functions = [function_of(text, name) for name in re.findall(r"def (\w+)\(.*\):$", text, re.MULTILINE)]
        for lines in functions:  # without those that are printed as variants of others
            (share,) = (line for line in lines if line.strip().startswith("b0_share:"))
            assert "b0_share: share of f32[304]" in share and any(
                "update(bucket=0, b0_share)" in line for line in lines
            )


def test_devices_with_other_chunks_print_one_function() -> None:
    """Only the table says which chunks a device sends."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    pipeline = default_pipeline(buckets=ByBytes(1.0, 0.0001), algorithm=Ring(), max_grad_norm=1.0, placement="mirrored")
    program: Program = run_passes(captured_model(model, 3, 6, columns=8), pipeline)
    text = program.to_text()
    assert text.count("\ndef ") == 1 and "# cpu:0 … cpu:2 (replicas 0 … 2) run this" in text
    assert "clip_factor: f32[]               = clip_factor(norm, max_norm=1.0)" in text
    assert re.search(r"b0_clipped: f32\[\d+\] +=", text) and "update(bucket=0, b0_clipped)" in text
