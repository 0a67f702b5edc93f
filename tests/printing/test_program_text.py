import difflib
import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from selections import exhaustive, slow
from tiny_programs import (
    MUON,
    PASS_NAMES,
    SMALL_BUCKETS,
    TwoLayers,
    Weight,
    captured_model,
    captured_two_layers,
    every_stage,
    handmade,
    run_up_to,
    sgd_step,
    targets,
)
from torch import fx, nn
from torch.testing import FileCheck

import mirrorc
from mirrorc.capture.rewrites.value_names import with_stable_names
from mirrorc.ir import ops
from mirrorc.ir.program import Stage
from mirrorc.passes import default_pipeline
from mirrorc.printing.printed_values import type_of
from mirrorc.printing.program_text import ProgramPrinter

# Stages of programs without a bucket plan.
BEFORE_BUCKETS = (
    "capture",
    "decompose-gelu",
    "read-row-elements",
    "recompute-elementwise",
    "lay-channels-last",
    "recompute-checkpoints",
)
SUPPORT = Path(__file__).parents[1] / "support"


def lowered(num_devices: int = 2, **shape: bool) -> str:
    return run_up_to("lower-devices", handmade(num_devices, **shape), **SMALL_BUCKETS).to_text()  # type: ignore[arg-type]


def functions(text: str) -> list[str]:
    return re.findall(r"^def (\w+)\(.*?$", text, flags=re.MULTILINE)


def step_with_dump(**options: object) -> mirrorc.Step:
    step = sgd_step(TwoLayers(), loss_fn=torch.nn.functional.cross_entropy, **options)
    step.prepare(torch.randn(4, 4), target=torch.tensor([0, 1, 2, 0]))
    return step


def test_the_heading_names_pass_stage_devices_buckets_and_time() -> None:
    program = run_up_to("pack-gradients", handmade(2), **SMALL_BUCKETS)
    first, *_ = ProgramPrinter(program).text(after="pack-gradients", milliseconds=3.14159).splitlines()
    assert first == "# mirrorc · after pack-gradients · stage PACKED · 2 devices · 2 buckets · 3.1 ms"
    assert handmade(1).to_text().splitlines()[0] == "# mirrorc · stage CAPTURED · 1 device · 0 buckets"


def test_the_bucket_table() -> None:
    weights = [Weight("small", (3,), torch.bfloat16), Weight("large", (512, 1024)), Weight("m", (300,), rule=MUON)]
    text = run_up_to("plan-buckets", handmade(1, weights), **SMALL_BUCKETS).to_text()
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines() if line.startswith("# bucket")]
    assert rows == [
        ["# bucket 0", "f32", "1.2 KiB", "1 gradient", "Muon group 0"],
        ["# bucket 1", "f32", "2.0 MiB", "1 gradient", "AdamW group 0"],
        ["# bucket 2", "bf16", "0.1 KiB", "1 gradient", "AdamW group 0"],
    ]
    assert re.findall(r"^#   (\S.*)$", text, re.MULTILINE) == ["m[300]", "large[512, 1024]", "small[3]"]


def test_remarks_are_printed() -> None:
    program = run_up_to("schedule-overlap", handmade(2), **SMALL_BUCKETS)
    kept = [str(remark) for remark in program.remarks if remark.is_kept]
    assert [f"# remark: {remark}" for remark in kept] == re.findall("^# remark: .*$", program.to_text(), re.MULTILINE)
    assert len(kept) == 3 < len(program.remarks)


def test_a_remark_is_one_line_whatever_is_in_it() -> None:
    remarks = ("first\nsecond\r\nthird", "größe ☃\u2028\x0b", r"C:\new")
    program = run_up_to("lower-devices", handmade(2)).evolve(remarks=remarks)
    text = program.to_text()
    printed = [line for line in text.splitlines() if line.startswith("# remark: ")]
    assert printed == [r"# remark: first\nsecond\r\nthird", r"# remark: größe ☃\u2028\x0b", r"# remark: C:\new"]


def bucket_rows(text: str) -> list[str]:
    return re.findall(r"^# bucket .*$", text, flags=re.MULTILINE)


def test_a_bucket_says_which_gradient_of_which_region_is_its_last_once_it_is_packed() -> None:
    stages = every_stage(handmade(2), **SMALL_BUCKETS)
    for name, program in stages.items():
        found = [row.partition(" · ready after ")[2] for row in bucket_rows(program.to_text())]
        without = [""] * len(program.buckets)
        expected = ["d(fc2.weight) in bwd_0", "d(fc1.weight) in bwd_1"]
        assert found == (expected if program.stage >= Stage.PACKED else without), name


def test_a_bucket_whose_parameters_are_shared_says_so() -> None:
    stages = every_stage(handmade(2))
    is_shared = {name: " · shared" in program.to_text() for name, program in stages.items()}
    assert [name for name, found in is_shared.items() if found] == [
        "share-parameters",
        "send-rows",
        "lower-collectives",
        "update-in-parts",
        "lower-devices",
    ]
    assert " · shared · ready after d(fc1.weight) in bwd_0" in bucket_rows(stages["lower-devices"].to_text())[0]


def test_gradients_of_a_bucket_are_listed_in_full_on_request() -> None:
    program = run_up_to("pack-gradients", handmade(2, [Weight(f"layer{i}.weight", (i, 3)) for i in range(1, 7)]))
    together = "#   " + " ".join(f"layer{i}.weight[{i}, 3]" for i in range(6, 0, -1))
    assert program.to_text().splitlines()[2] == together
    first, *slots = program.to_text(slots=True).splitlines()[1:8]
    assert re.split(r"\s{2,}", first) == [
        "# bucket 0",
        "f32",
        "0.4 KiB",
        "6 gradients",
        "AdamW group 0 · ready after d(layer1.weight) in bwd_0",
    ]
    assert slots == [f"#     layer{i}.weight[{i}, 3]" for i in range(6, 0, -1)]
    rest = [
        [line for line in text.splitlines() if not line.startswith("# ")]
        for text in (program.to_text(fold=False), program.to_text(slots=True))
    ]
    assert rest[0] == rest[1]


def test_devices_that_run_the_same_are_printed_once() -> None:
    text = lowered(3)
    assert functions(text) == ["cpu_0"]
    assert "\n# cpu:0 … cpu:2 (replicas 0 … 2) run this\ndef cpu_0(" in text


def test_an_uneven_batch_prints_a_function_for_each_shape() -> None:
    text = lowered(3, uneven=True)
    assert functions(text) == ["cpu_0", "cpu_2"]
    FileCheck().check("# cpu:0, cpu:1 (replicas 0, 1) run this").check("def cpu_0(x: f32[2, 4]").check("fwd_0(").check(
        "# cpu:2 (replica 2) runs this"
    ).check("def cpu_2(x: f32[1, 4]").check_same("# as cpu_0, but for these lines").check("fwd_0.shard1(").run(text)
    assert text.count("wait(") == 2, "of the second function, lines that are no other are left out"
    whole = run_up_to("lower-devices", handmade(3, uneven=True), **SMALL_BUCKETS).to_text(fold=False)
    assert whole.count("wait(") == 4 and "but for these lines" not in whole


def test_a_lowered_program_reads_as_in_the_design() -> None:
    FileCheck().check("    loss: f32[] ").check_same("fwd_0(x, fc1.weight, fc2.weight)").check(
        "d(fc2.weight)"
    ).check_same("bwd_0(").check("b0: f32[16] ").check_same("pack(bucket=0, d(fc2.weight))").check(
        "b0_pending: pending f32[16] "
    ).check_same("all_reduce(bucket=0, b0, op=sum, link=shared-memory)").check("bwd_1(").check(
        "b0_sum: f32[16] "
    ).check_same("wait(bucket=0, b0_pending)").check("update(bucket=0, b0_sum)").check_same("AdamW group 0").check(
        "return loss"
    ).run(lowered())


def test_a_share_is_printed_with_the_type_of_the_whole_so_that_devices_print_the_same() -> None:
    stages = every_stage(handmade(3, [Weight("a", (200,))]))
    shares = [n.meta["val"].numel() for n in targets(stages["lower-collectives"].mirrored_graph, ops.wait)]
    assert shares == [64, 64, 80]
    text = stages["lower-devices"].to_text()
    FileCheck().check("b0: f32[208] ").check("b0_pending: pending f32[208] ").check_same("reduce_scatter(").check(
        "b0_share: share of f32[208] "
    ).check_same("wait(bucket=0, b0_pending)").check("update(bucket=0, b0_share)").check_same(
        "AdamW group 0, this device's share of 3"
    ).run(text)
    assert functions(text) == ["cpu_0"] and "b0_sum" not in text


def test_received_parameters_are_printed_with_their_type() -> None:
    text = run_up_to("lower-devices", handmade(2, [Weight("a", (300,), rule=MUON)])).to_text()
    assert functions(text) == ["cpu_0", "cpu_1"]
    FileCheck().check("b0_parameters: f32[304] ").check_same("step_optimizer(b0_sum)").check(
        "send(bucket=0, b0_parameters, destination=1, link=shared-memory)"
    ).check("def cpu_1").check("all_reduce(").check("b0_incoming: pending f32[304] ").check_same(
        "recv(bucket=0, source=0, link=shared-memory)"
    ).check("b0_parameters: f32[304] ").check_same("wait(bucket=0, b0_incoming)").check(
        "store(bucket=0, b0_parameters)"
    ).run(text)


REGION_CALL = r"(fwd|bwd)_\d+(\.shard\d+)?\("


@pytest.mark.slow
def test_every_value_of_a_collective_and_of_a_region_has_a_type() -> None:
    for name, program in every_stage(captured_two_layers(2), **SMALL_BUCKETS).items():
        for line in program.to_text(regions=True).splitlines():
            result, is_assignment, operation = line.partition(" = ")
            if is_assignment and not line.startswith("#") and not re.match(REGION_CALL, operation):
                assert re.search(r": (pending |share of )?(\(.*\)|[a-z]+\d*\[[\d, ]*\])\s*$", result), (name, line)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle, self.head = nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.words(x.argmax(1))))


def test_the_gradient_of_some_uses_of_a_tied_parameter_is_told_from_the_whole_and_names_no_module() -> None:
    text = every_stage(captured_model(Tied()), **SMALL_BUCKETS)["lower-devices"].to_text()
    assert re.search(r"d\(words.weight, in part\), .* = bwd_0\(.*# backward of the loss, middle$", text, re.MULTILINE)
    assert re.search(
        r" d\(words.weight\) .* = bwd_2\(.*d\(words.weight, in part\).*# backward of words$", text, re.MULTILINE
    )


def test_a_mirrored_program_names_the_device_of_every_line() -> None:
    text = run_up_to("insert-all-reduce", handmade(2)).to_text()
    assert re.findall(r"^    (\S+)\s+\| ", text, flags=re.MULTILINE) == ["each", "each", "each", "all", "each"]
    whole = run_up_to("insert-all-reduce", handmade(2)).to_text(fold=False)
    owners = re.findall(r"^    (\S+)\s+\| ", whole, flags=re.MULTILINE)
    assert owners == ["cpu:0", "cpu:1", "cpu:0", "cpu:0", "cpu:1", "cpu:1", "all", "cpu:0", "cpu:1"]


def test_every_stage_prints() -> None:
    for name, program in every_stage(handmade(2, buffer=True, uneven=True), **SMALL_BUCKETS).items():
        text = ProgramPrinter(program).text(after=name, regions=True)
        num_buckets = len(program.buckets)
        assert text.startswith(
            f"# mirrorc · after {name} · stage {program.stage.name} · 2 devices · {num_buckets} buckets\n"
        )
        assert num_buckets == 2 or name in BEFORE_BUCKETS
        assert text.endswith("\n") and functions(text)


def test_bodies_of_regions_are_printed_on_request() -> None:
    program = run_up_to("lower-devices", handmade(2), **SMALL_BUCKETS)
    assert "region " not in program.to_text() and str(program) == program.to_text()
    FileCheck().check("def cpu_0").check("region fwd_0(x: f32[2, 4]").check("aten.sum.default(x)").check(
        "region bwd_0("
    ).check("aten.mul.Tensor(").check("return [").run(program.to_text(regions=True))


def test_lines_name_the_users_source() -> None:
    text = run_up_to("lower-devices", captured_two_layers()).to_text(regions=True)
    line = next(
        i for i, code in enumerate((SUPPORT / "tiny_programs.py").read_text().splitlines(), 1) if "self.fc2(" in code
    )
    assert f"tiny_programs.py:{line}  return self.fc2(" in text


SOURCE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return self.layers(x)
"""


def imported(path: Path, source: str) -> ModuleType:
    path.parent.mkdir(parents=True)
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("users_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_without_sources_the_text_is_the_same_when_code_moves(tmp_path: Path) -> None:
    files = [
        imported(tmp_path / "one" / "model.py", SOURCE),
        imported(tmp_path / "other" / "elsewhere.py", "# a comment\n" * 7 + SOURCE),
    ]
    stages = [every_stage(captured_model(file.Net()), **SMALL_BUCKETS) for file in files]
    for name in stages[0]:
        full, bare = ([s[name].to_text(regions=True, sources=sources) for s in stages] for sources in (True, False))
        assert bare[0] == bare[1] and full[0] != full[1], name
        assert "model.py:12" in full[0] and "elsewhere.py:19" in full[1]
        assert "return self.layers(x)" in full[0] and "return self.layers(x)" not in bare[0]
        assert code_of(full[0]) == code_of(bare[0]), name


def code_of(text: str) -> list[str]:
    lines = [line if line.startswith("#") else line.partition("  # ")[0].rstrip() for line in text.splitlines()]
    return [line for line in lines if line]


@pytest.mark.slow
def test_remarks_and_comments_stay_where_sources_are_left_out() -> None:
    program = run_up_to("lower-devices", captured_two_layers())
    assert program.remarks
    for said in (
        "# remark: ",
        "# SGD group 0",
        "# cpu:0, cpu:1 (replicas 0, 1) run this",
        "# backward of the loss, fc2 … fc1",
    ):
        assert said in program.to_text(sources=False)


class Block(nn.Module):
    def __init__(self, width: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.up = nn.Linear(4, width)
        self.activation = activation()
        self.down = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.activation(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, width: int = 6, activation: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(5, nn.Tanh), Block(width, activation), Block(7, nn.Tanh)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.slow
def test_values_in_regions_are_called_by_their_module() -> None:
    text = run_up_to("lower-devices", captured_model(Blocks())).to_text(regions=True)
    forward, backward = text.split("region bwd_0(")
    FileCheck().check("region fwd_0(").check("    blocks_0_up_addmm: f32[4, 5] = ").check(
        "    blocks_0_activation_tanh: f32[4, 5] = aten.tanh.default(blocks_0_up_addmm)"
    ).check("    blocks_1_up_addmm: f32[4, 6] = ").check("    blocks_2_down_addmm: f32[4, 4] = ").check(
        "    head_addmm: f32[4, 3] = "
    ).run(forward)
    FileCheck().check("    d_head_mm: f32[4, 4] = ").check("    d_blocks_2_down_mm: f32[4, 7] = ").check(
        "    d_blocks_1_activation_tanh_backward: f32[4, 6] = "
    ).check("    d_blocks_0_up_sum: f32[1, 5] = ").run(backward)
    assert not re.search(r"\b(addmm|mm|tanh|t)_\d+:", text)  # the tracer's numbers


class Functional(nn.Module):
    def __init__(self, place: int = -1, extra: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.weights = nn.ParameterList([nn.Parameter(torch.eye(4)) for _ in range(3)])
        self.head = nn.Linear(4, 3)
        self.place, self.extra = place, extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 2 * x
        for i, layer in enumerate(self.layers):
            hidden = torch.relu(layer(x))
            x = x + hidden.flatten(1) if i % 2 else x * hidden
            x = self.extra(x) if i == self.place else x
        for i, weight in enumerate(self.weights, len(self.layers)):
            x = x + torch.relu(x @ weight)
            x = self.extra(x) if i == self.place else x
        return self.head(x)


class Wrapped(nn.Module):
    def __init__(self, *options: Any) -> None:
        super().__init__()
        self.net = Functional(*options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@pytest.mark.slow
def test_values_between_modules_are_called_by_what_they_are_made_of() -> None:
    text = run_up_to("lower-devices", captured_model(Functional())).to_text(regions=True)
    FileCheck().check("region fwd_0(").check("    x_mul: f32[4, 4] = ").check("layers_0_relu: ").check(
        "layers_0_mul: f32[4, 4] = aten.mul.Tensor(x_mul, layers_0_relu)"
    ).check("layers_1_add: f32[4, 4] = aten.add.Tensor(layers_0_mul, layers_1_").check("weights_0_mm: ").check(
        "weights_0_add: f32[4, 4] = aten.add.Tensor(layers_3_add, weights_0_relu)"
    ).check("head_log_softmax: ").check("region bwd_0(").check("d_head_nll_loss_backward: ").check(
        "d_weights_2_threshold_backward: "
    ).check("d_weights_2_add: ").check("d_layers_3_threshold_backward: ").run(text)
    inside = run_up_to("lower-devices", captured_model(Wrapped())).to_text(regions=True)
    FileCheck().check("net_layers_0_relu: ").check("net_weights_0_mm: ").check("d_net_layers_3_threshold").run(inside)


PLUS_ONE = functools.partial(torch.add, other=1)
MORE_CALLS = [(Functional, place, torch.relu) for place in range(7)]
MORE_CALLS += [(Wrapped, 1, torch.tanh), (Functional, 2, PLUS_ONE), (Wrapped, 5, PLUS_ONE)]  # type: ignore[list-item]
FAST_CALLS = MORE_CALLS[3::6]  # one of each kind of model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "place", "extra"),
    [
        *FAST_CALLS,
        *slow(*(case for case in MORE_CALLS[::3] if case not in FAST_CALLS)),
        *exhaustive(*(case for i, case in enumerate(MORE_CALLS) if i % 3 and case not in FAST_CALLS)),
    ],
)
def test_one_more_call_between_modules_changes_only_lines_about_it(
    model: type[nn.Module], place: int, extra: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """They name what the call is put after, or what comes next; besides them, calls of regions, which count what is saved."""
    plain, more = (every_stage(captured_model(m)) for m in (model(), model(place, extra)))
    steps = [*(f"layers_{i}_" for i in range(4)), *(f"weights_{i}" for i in range(3)), "head_"]
    about = steps[place : place + 2]
    for name in plain:
        texts = [p[name].to_text(regions=True, slots=True, sources=False).splitlines() for p in (plain, more)]
        changed = [line[2:] for line in difflib.ndiff(*texts) if line[0] in "+-"]
        assert 0 < len(changed) <= 40, (name, changed)
        for line in changed:
            is_call = re.search(f" = {REGION_CALL}", line)
            assert is_call or any(part in line for part in about), (name, about, line)


def test_arguments_of_regions_are_called_as_in_the_call() -> None:
    model = nn.Linear(4, 3)  # whose argument is called input, as a function of Python is
    with mirrorc.compile(
        model,
        2,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=nn.functional.cross_entropy,
        compiler=mirrorc.Compiler(backend="eager"),
    ) as step:
        text = step.prepare(torch.randn(4, 4), target=torch.tensor([0, 1, 2, 0])).to_text(regions=True)
    FileCheck().check("= fwd_0(input, target, ").check("region fwd_0(").check_same("input: f32[2, 4]").check(
        "aten.addmm.default(bias, input, "
    ).check("region bwd_0(").check_same("input: f32[2, 4]").run(text)
    assert "input_1" not in text


def renumbered(graph: fx.Graph, seed: int) -> fx.Graph:
    copy, values = fx.Graph(), {}
    names = torch.randperm(len(graph.nodes), generator=torch.Generator().manual_seed(seed)).tolist()
    for node, number in zip(graph.nodes, names, strict=True):
        name = node.name if node.op == "placeholder" else f"value_{number}"
        args, kwargs = (fx.node.map_arg(part, values.__getitem__) for part in (node.args, node.kwargs))
        if node.op == "output":
            copy.output(args[0])
        else:
            values[node] = copy.create_node(node.op, node.target, args, kwargs, name=name)
            values[node].meta = node.meta
    return copy


@pytest.mark.slow
def test_names_do_not_depend_on_the_tracers_numbering() -> None:
    program = captured_model(Blocks())
    for seed in (0, 1):
        shuffled = [renumbered(graph, seed) for graph in program.shard_graphs]
        assert [n.name for n in shuffled[0].nodes] != [n.name for n in program.shard_graphs[0].nodes]
        again = program.evolve(shard_graphs=tuple(with_stable_names(graph, program.arguments) for graph in shuffled))
        stages, found = every_stage(program, **SMALL_BUCKETS), every_stage(again, **SMALL_BUCKETS)
        for name in stages:
            assert found[name].to_text(regions=True) == stages[name].to_text(regions=True), name
            assert [str(g) for g in found[name].graphs()] == [str(g) for g in stages[name].graphs()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "caps", [pytest.param({}, marks=pytest.mark.slow), SMALL_BUCKETS], ids=["one-bucket", "many-buckets"]
)
@pytest.mark.parametrize("change", [{"width": 9}, {"activation": nn.ReLU}, {"activation": nn.GELU}], ids=str)
def test_changing_a_layer_changes_only_lines_that_name_it(change: dict[str, Any], caps: dict[str, float]) -> None:
    """Besides them: calls of regions, which count what is saved, and the sizes of the layer's own buckets."""
    before, after = (every_stage(captured_model(Blocks(**c)), **caps) for c in ({}, change))
    for name in before:
        texts = [p[name].to_text(regions=True, slots=True, sources=False).splitlines() for p in (before, after)]
        changed = [line[2:] for line in difflib.ndiff(*texts) if line[0] in "+-"]
        own = {b.index for b in before[name].buckets if any("blocks.1." in slot.variable for slot in b.slots)}
        sizes = [f"b{index}{kind}: " for index in own for kind in ("", "_pending", "_sum", "_share")]
        sizes += [f"wait(bucket={index}, " for index in own]
        sized = (
            tuple([f"# bucket {index}  " for index in own] + [*sizes, "#   shares, of "]) if "width" in change else ()
        )
        assert changed and (own or name in BEFORE_BUCKETS), name
        for line in changed:
            is_named = re.search(r"\bblocks\.1\.|blocks_1_", line)
            is_call = re.search(f" = {REGION_CALL}", line)
            assert is_named or is_call or line.split("|")[-1].strip().startswith(sized), (name, line)


def test_types() -> None:
    assert type_of(torch.zeros(2, 3)) == "f32[2, 3]" and type_of(torch.tensor(1)) == "i64[]"
    assert type_of(ops.Pending(torch.zeros(8, dtype=torch.bfloat16))) == "pending bf16[8]"
    assert type_of((torch.zeros(1), None)) == "(f32[1], )"


def check_files(directory: Path) -> None:
    files = sorted(path.name for path in directory.glob("*.txt"))
    expected = ["capture", *(compiler_pass.name for compiler_pass in default_pipeline())]
    assert files == [f"{i:02d}-{name}.txt" for i, name in enumerate(expected)]
    suffixes = {path.suffix for path in directory.iterdir() if not path.name.startswith(".")}
    assert suffixes == {".txt", ".diff", ".md", ".gz"}
    for name, file in zip(expected, files, strict=True):
        assert f"after {name} · stage " in (directory / file).read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.slow
def test_the_environment_variable_names_a_directory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRRORC_DUMP", str(tmp_path / "from-environment"))
    step_with_dump().close()
    check_files(tmp_path / "from-environment" / "program-0")
    step_with_dump(dump=tmp_path / "argument").close()
    check_files(tmp_path / "argument" / "program-0")
    assert len(list((tmp_path / "from-environment").iterdir())) == 1


@pytest.mark.slow
def test_without_dump_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIRRORC_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    step_with_dump().close()
    assert list(tmp_path.iterdir()) == []


PRINT_ALL = """
from tiny_programs import captured_two_layers, every_stage, SMALL_BUCKETS
for name, program in every_stage(captured_two_layers(3), **SMALL_BUCKETS).items():
    print(name, program.to_text(regions=True), sep="\\n")
"""


@pytest.mark.slow
def test_names_are_the_same_in_every_run() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PRINT_ALL],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(SUPPORT), "PYTHONIOENCODING": "utf-8"},
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        for seed in ("1", "2")
    ]
    one, other = (process.communicate(timeout=120)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert one == other and all(name in one for name in PASS_NAMES)
