import gzip
import itertools
import operator
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from module_programs import cut_programs, passes_of, run_graph, stages
from saved_programs import (
    HANDMADE,
    LARGE_MODELS,
    SMALL_MODELS,
    assert_same,
    captured,
    graphs_of,
    on_devices,
    one_call,
    reload,
    stages_of,
)
from selections import slow_but
from tiny_programs import SMALL_BUCKETS, captured_two_layers, every_stage
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.program import ArgumentKind, Program, placeholders_of
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import verify

SUPPORT = Path(__file__).parents[1] / "support"


def assert_kept(program: Program, expected: Program, directory: Path) -> Program:
    """Saves and loads a program, compares what is loaded, and gives it; saved again, it gives the same bytes."""
    found = reload(program, directory)
    assert_same(found, expected)
    found.save(directory / "again.mirror")
    assert (directory / "again.mirror").read_bytes() == (directory / "program.mirror").read_bytes()
    return found


def assert_kept_at_every_stage(program: Program, directory: Path, **options: Any) -> None:
    found = assert_kept(program, program, directory)
    for _, passes in itertools.groupby(default_pipeline(**options), operator.attrgetter("output_stage")):
        of_stage = list(passes)
        program = run_passes(program, of_stage)
        found = assert_kept(run_passes(found, of_stage), program, directory)
    verify(found)


FAST_MODELS = ("mlp", "noisy")


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(FAST_MODELS, [*SMALL_MODELS, *sorted(LARGE_MODELS)]))
def test_a_model_is_kept_at_every_stage(name: str, tmp_path: Path) -> None:
    assert_kept_at_every_stage(captured(name), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", slow_but(["conv"], ["conv", "dropout"]))
def test_a_model_is_kept_on_fewer_devices(name: str, num_devices: int, tmp_path: Path) -> None:
    assert_kept_at_every_stage(on_devices(captured(name), num_devices), tmp_path, **SMALL_BUCKETS)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(("own optimizer",), HANDMADE))
def test_passes_make_of_a_loaded_program_what_they_make_of_the_saved_one(name: str, tmp_path: Path) -> None:
    passes = default_pipeline(**SMALL_BUCKETS)
    stages = [HANDMADE[name](), *every_stage(HANDMADE[name](), **SMALL_BUCKETS).values()]
    for done, program in enumerate(stages):
        found = assert_kept(program, program, tmp_path)
        verify(found)
        finished = run_passes(found, passes[done:])
        assert_same(finished, run_passes(program, passes[done:]))
        verify(finished)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward", "backward", "backward to x"])
def test_forward_and_backward_of_a_module_are_kept_at_every_stage(name: str, tmp_path: Path) -> None:
    captured = cut_programs()[name]
    programs = list(stages(captured))
    for program in programs:
        verify(assert_kept(program, program, tmp_path))
        text = program.to_text(complete=True)
        assert mirrorc.parse(text).to_text(complete=True) == text
    assert_same(run_passes(reload(captured, tmp_path), passes_of(captured)), programs[-1])


def test_a_loaded_forward_computes_the_same_bits(tmp_path: Path) -> None:
    program = cut_programs()["forward"]
    torch.manual_seed(0)
    variables = {name: torch.randn(variable.shape) for name, variable in program.variables.items()}
    for graph, loaded in zip(program.shard_graphs, reload(program, tmp_path).shard_graphs, strict=True):
        given = {"x": torch.randn(next(iter(graph.nodes)).meta["val"].shape), "seed": torch.tensor(7)}
        assert str(run_graph(graph, given, variables)) == str(run_graph(loaded, given, variables))


def lowered(name: str = "mlp") -> Program:
    return run_passes(captured(name), default_pipeline(**SMALL_BUCKETS))


def test_modules_of_regions_are_shared_not_copied(tmp_path: Path) -> None:
    found = reload(lowered(), tmp_path)
    seen = set()
    for module in found.device_graphs.values():
        for node in module.graph.nodes:
            if node.op == "call_module":
                assert module.get_submodule(node.target) is found.regions[node.target].graph_module
                seen.add(node.target)
    assert seen == set(found.regions) and len(seen) > 2


def results_of(module: fx.GraphModule) -> Any:
    generator = torch.Generator().manual_seed(0)
    arguments = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            argument = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            arguments.append(argument.random_(0, 2, generator=generator))
    return module(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet", "dropout", "noisy"])
def test_regions_compute_the_same_bits(name: str, tmp_path: Path) -> None:
    program = lowered(name)
    found = reload(program, tmp_path)
    for region in program.regions:
        results, expected = (results_of(p.regions[region].graph_module) for p in (found, program))
        assert len(results) == len(expected) > 0
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(results, expected, strict=True))


def tensors_of(program: Program) -> Iterator[Any]:
    for graph in graphs_of(program):
        for node in graph.nodes:
            value = node.meta.get("val")
            for item in value if isinstance(value, list | tuple) else (value,):
                item = item.value if isinstance(item, ops.Pending) else item
                if isinstance(item, torch.Tensor):
                    yield item


def test_values_are_of_one_fake_mode_and_each_of_a_function_has_its_own_memory(tmp_path: Path) -> None:
    program = reload(lowered(), tmp_path)
    found = list(tensors_of(program))
    assert len({id(tensor.fake_mode) for tensor in found}) == 1
    constant = torch.ones(1)
    with found[0].fake_mode:
        assert found[0].add(constant).fake_mode is found[0].fake_mode  # Inductor mixes constants with values, too
    for graph in graphs_of(program):
        values = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
        assert len({value.untyped_storage()._cdata for value in values}) == len(values) > 0


def test_devices_need_not_be_there(tmp_path: Path) -> None:
    with FakeTensorMode():
        value = torch.empty(4, device="cuda:5")
    program = one_call(torch.ops.aten.empty_like.default, (), {"device": torch.device("cuda:5")}, val=value)
    program = program.evolve(devices=(Device("cuda:5/1", torch.device("cuda:5")),))
    assert_same(reload(program, tmp_path), program)


@pytest.mark.slow
def test_no_path_of_this_machine_is_in_a_file(tmp_path: Path) -> None:
    reload(lowered("bert"), tmp_path)
    text = (tmp_path / "program.mirror").read_text(encoding="utf-8")
    assert "modeling_bert.py:" in text
    for folder in (mirrorc.__path__[0], torch.__path__[0], str(SUPPORT), sys.prefix, os.getcwd()):
        assert folder not in text


@pytest.mark.slow
def test_compressed_files_hold_the_same_and_are_known_by_their_content(tmp_path: Path) -> None:
    program = lowered()
    assert_same(reload(program, tmp_path, "program.mirror.gz"), program)
    program.save(tmp_path / "program.mirror")
    compressed, plain = ((tmp_path / name).read_bytes() for name in ("program.mirror.gz", "program.mirror"))
    assert gzip.decompress(compressed) == plain and len(compressed) < len(plain) / 4
    (tmp_path / "renamed").write_bytes(compressed)
    assert_same(Program.load(str(tmp_path / "renamed")), program)
    program.save(str(tmp_path / "again.mirror.gz"))
    assert (tmp_path / "again.mirror.gz").read_bytes() == compressed


@pytest.mark.slow
def test_files_grow_with_the_program_and_no_faster(tmp_path: Path) -> None:
    sizes = []
    for num_calls in (1000, 2000):
        program = one_call(torch.ops.aten.relu.default)
        graph = program.mirrored_graph
        with graph.inserting_before(graph.output_node()):
            for _ in range(num_calls):
                graph.call_function(torch.ops.aten.add.Tensor, (next(iter(graph.nodes)), 1.5), {"alpha": 2})
        reload(program, tmp_path)
        sizes.append((tmp_path / "program.mirror").stat().st_size)
    assert sizes[1] < 2.1 * sizes[0] and sizes[1] < 2000 * 100


def test_a_file_is_readable_as_others_of_its_user_are(tmp_path: Path) -> None:
    reload(HANDMADE["one device"](), tmp_path)
    (tmp_path / "other").touch()
    assert (tmp_path / "program.mirror").stat().st_mode == (tmp_path / "other").stat().st_mode


IN_ANOTHER_PROCESS = """
import sys
from pathlib import Path
from mirrorc.ir.program import Program
directory = Path(sys.argv[1])
for path in sorted(directory.glob("*.mirror")):
    program = Program.load(path)
    path.with_suffix(".txt").write_text(program.to_text(regions=True), encoding="utf-8")
    program.save(path.with_suffix(".again"))
sys.path.insert(0, sys.argv[2])
from tiny_programs import captured_two_layers, every_stage
for stage, program in every_stage(captured_two_layers()).items():
    program.save(directory / f"{stage}.own")
"""


@pytest.mark.slow
def test_another_process_loads_the_same_and_writes_the_same_bytes(tmp_path: Path) -> None:
    """It has registered neither the seeded random operators nor Inductor's, and hashes strings in another way."""
    import torch._inductor.inductor_prims  # registers the operator below

    stages = stages_of("noisy")
    programs = {stage: stages[stage] for stage in ("capture", "place-gradients", "insert-update", "lower-devices")}
    programs["pool"] = one_call(torch.ops.prims._low_memory_max_pool_with_offsets.default)
    for stage, program in programs.items():
        program.save(tmp_path / f"{stage}.mirror")
    assert b"seeded.aten.bernoulli.default" in (tmp_path / "capture.mirror").read_bytes()
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_ANOTHER_PROCESS, str(tmp_path), str(SUPPORT)],
        check=True,
        timeout=200,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    for stage, program in programs.items():
        assert (tmp_path / f"{stage}.txt").read_text(encoding="utf-8") == program.to_text(regions=True)
        assert (tmp_path / f"{stage}.again").read_bytes() == (tmp_path / f"{stage}.mirror").read_bytes()
    for stage, program in every_stage(captured_two_layers()).items():
        program.save(tmp_path / "here.mirror")
        assert (tmp_path / f"{stage}.own").read_bytes() == (tmp_path / "here.mirror").read_bytes()


def test_kinds_of_arguments_are_members_again(tmp_path: Path) -> None:
    program = reload(captured("dropout"), tmp_path)
    kinds = [argument.kind for argument in program.arguments]
    assert kinds[-2:] == [ArgumentKind.LOSS_WEIGHT, ArgumentKind.SEED] and isinstance(kinds[0], ArgumentKind)
    for graph in program.shard_graphs:
        for kind in ArgumentKind:
            names = [str(node.target) for node in placeholders_of(graph, program.arguments, kind)]
            assert names == [argument.name for argument in program.arguments if argument.kind is kind]


def test_comments_and_empty_lines_are_read_over() -> None:
    text = lowered().to_text(complete=True)
    tables, at, functions = text.partition("@device")
    commented = re.sub(r"(?m)(^    .*\)$)", r"\1  # one\n\n    # two", functions)
    assert commented.count("# two") > 20
    assert mirrorc.parse(f"{tables}# three\n\n{at}{commented}").to_text(complete=True) == text


@pytest.mark.slow
def test_symbolic_sizes_stay_those_of_one_environment(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss_fn": nn.functional.mse_loss}
    compiler, debug = mirrorc.Compiler(backend="eager", dynamic=True), mirrorc.Debug(dump=tmp_path)
    with mirrorc.compile(model, ["cpu:0", "cpu:1"], compiler=compiler, debug=debug, **options) as step:
        step.prepare(torch.zeros(8, 4), target=torch.zeros(8, 3))
    paths = sorted((tmp_path / "program-0").glob("*.mirror.gz"))
    for path in paths:
        program = Program.load(path)
        verify(program)
        assert len({id(tensor.fake_mode) for tensor in tensors_of(program)}) == 1, path
        assert mirrorc.parse(program.to_text(complete=True)).to_text(regions=True) == program.to_text(regions=True)
    assert len(paths) > 8
