import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_programs import (
    MUON,
    PASS_NAMES,
    SMALL_BUCKETS,
    TwoLayers,
    Weight,
    captured_two_layers,
    every_stage,
    handmade,
    run_up_to,
)
from torch.testing import FileCheck

import mirrorc
from mirrorc import ops
from mirrorc.dump import program_to_text, type_of
from mirrorc.passes import default_pipeline

HERE = Path(__file__).parent


def lowered(num_devices: int = 2, **shape: bool) -> str:
    return run_up_to("lower-devices", handmade(num_devices, **shape), **SMALL_BUCKETS).to_text()  # type: ignore[arg-type]


def functions(text: str) -> list[str]:
    return re.findall(r"^def (\w+)\(.*?$", text, flags=re.MULTILINE)


def step_with_dump(**options: object) -> mirrorc.Step:
    model = TwoLayers()
    return mirrorc.compile(
        model,
        ["cpu:0", "cpu:1"],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=torch.nn.functional.cross_entropy,
        backend="eager",
        example_inputs=((torch.randn(4, 4),), {"target": torch.tensor([0, 1, 2, 0])}),
        **options,  # type: ignore[arg-type]
    )


def test_the_heading_names_pass_stage_devices_buckets_and_time() -> None:
    program = run_up_to("pack-gradients", handmade(2), **SMALL_BUCKETS)
    first, *_ = program_to_text(program, after="pack-gradients", milliseconds=3.14159).splitlines()
    assert first == "# mirrorc · after pack-gradients · stage PACKED · 2 devices · 2 buckets · 3.1 ms"
    assert handmade(1).to_text().splitlines()[0] == "# mirrorc · stage CAPTURED · 1 device · 0 buckets"


def test_the_bucket_table() -> None:
    weights = [Weight("small", (3,), torch.bfloat16), Weight("large", (512, 1024)), Weight("m", (300,), rule=MUON)]
    text = run_up_to("plan-buckets", handmade(1, weights), **SMALL_BUCKETS).to_text()
    rows = [re.split(r"\s{2,}", line) for line in text.splitlines() if line.startswith("# bucket")]
    assert rows == [
        ["# bucket 0", "f32", "1.2 KiB", "m[300]", "Muon group 0"],
        ["# bucket 1", "f32", "2.0 MiB", "large[512, 1024]", "AdamW group 0"],
        ["# bucket 2", "bf16", "0.1 KiB", "small[3]", "AdamW group 0"],
    ]


def test_remarks_are_printed() -> None:
    program = run_up_to("schedule-overlap", handmade(2), **SMALL_BUCKETS)
    assert [f"# note: {remark}" for remark in program.remarks] == re.findall(
        "^# note: .*$", program.to_text(), re.MULTILINE
    )
    assert len(program.remarks) == 2


def test_devices_that_run_the_same_are_printed_once() -> None:
    text = lowered(3)
    assert functions(text) == ["cpu_0"]
    assert "cpu:1 runs the same as replica 1; cpu:2 runs the same as replica 2" in text


def test_an_uneven_batch_prints_a_function_for_each_shape() -> None:
    text = lowered(3, uneven=True)
    assert functions(text) == ["cpu_0", "cpu_2"]
    FileCheck().check("def cpu_0(x: f32[2, 4]").check("cpu:1 runs the same as replica 1").check("fwd_0(").check(
        "def cpu_2(x: f32[1, 4]"
    ).check("fwd_1(").run(text)


def test_a_lowered_program_reads_as_in_the_design() -> None:
    FileCheck().check("    loss ").check_same("fwd_0(x, fc1.weight, fc2.weight)").check("d(fc2.weight)").check_same(
        "bwd_0("
    ).check("b0 ").check_same("pack(bucket=0, d(fc2.weight))").check("b0_pending").check_same(
        "all_reduce(bucket=0, b0, op=sum, link=shared-memory)"
    ).check("bwd_1(").check("b0_sum").check_same("wait(bucket=0, b0_pending)").check(
        "update(bucket=0, b0_sum)"
    ).check_same("AdamW group 0").check("return loss").run(lowered())


def test_a_mirrored_program_names_the_device_of_every_line() -> None:
    text = run_up_to("insert-all-reduce", handmade(2)).to_text()
    owners = re.findall(r"^    (\S+)\s+\| ", text, flags=re.MULTILINE)
    assert owners == ["cpu:0", "cpu:1", "cpu:0", "cpu:0", "cpu:1", "cpu:1", "all", "cpu:0", "cpu:1"]


def test_every_stage_prints() -> None:
    for name, program in every_stage(handmade(2, buffer=True, uneven=True), **SMALL_BUCKETS).items():
        text = program_to_text(program, after=name, regions=True)
        assert text.startswith(f"# mirrorc · after {name} · stage {program.stage.name} · 2 devices · 2 buckets\n")
        assert text.endswith("\n") and functions(text)


def test_bodies_of_regions_are_printed_on_request() -> None:
    program = run_up_to("lower-devices", handmade(2), **SMALL_BUCKETS)
    assert "region " not in program.to_text() and str(program) == program.to_text()
    FileCheck().check("def cpu_0").check("region fwd_0(x: f32[2, 4]").check("aten.sum.default(x)").check(
        "region bwd_0("
    ).check("aten.mul.Tensor(").check("return [").run(program.to_text(regions=True))


def test_lines_name_the_users_source() -> None:
    text = run_up_to("lower-devices", captured_two_layers()).to_text()
    line = next(
        i for i, code in enumerate((HERE / "tiny_programs.py").read_text().splitlines(), 1) if "self.fc2(" in code
    )
    assert f"tiny_programs.py:{line}  return self.fc2(" in text


def test_types() -> None:
    assert type_of(torch.zeros(2, 3)) == "f32[2, 3]" and type_of(torch.tensor(1)) == "i64[]"
    assert type_of(ops.Pending(torch.zeros(8, dtype=torch.bfloat16))) == "pending bf16[8]"
    assert type_of((torch.zeros(1), None)) == "(f32[1], )"


def check_files(directory: Path) -> None:
    files = sorted(path.name for path in directory.iterdir())
    expected = ["capture", *(compiler_pass.name for compiler_pass in default_pipeline())]
    assert files == [f"{i:02d}-{name}.txt" for i, name in enumerate(expected)]
    for name, file in zip(expected, files, strict=True):
        assert f"after {name} · stage " in (directory / file).read_text(encoding="utf-8").splitlines()[0]


def test_dump_writes_a_file_for_each_pass(tmp_path: Path) -> None:
    with step_with_dump(dump=tmp_path / "deep" / "dump") as step:
        check_files(tmp_path / "deep" / "dump" / "program-0")
        step.prepare(torch.randn(6, 4), target=torch.zeros(6, dtype=torch.int64))
        check_files(tmp_path / "deep" / "dump" / "program-1")
        last = (
            tmp_path / "deep" / "dump" / "program-1" / f"{len(default_pipeline()):02d}-lower-devices.txt"
        ).read_text()
        assert str(step.program).splitlines()[1:] == last.splitlines()[1 : len(str(step.program).splitlines())]


def test_the_environment_variable_names_a_directory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRRORC_DUMP", str(tmp_path / "from-environment"))
    step_with_dump().close()
    check_files(tmp_path / "from-environment" / "program-0")
    step_with_dump(dump=tmp_path / "argument").close()
    check_files(tmp_path / "argument" / "program-0")
    assert len(list((tmp_path / "from-environment").iterdir())) == 1


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


def test_names_are_the_same_in_every_run() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PRINT_ALL],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(HERE), "PYTHONIOENCODING": "utf-8"},
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        for seed in ("1", "2")
    ]
    one, other = (process.communicate(timeout=120)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert one == other and all(name in one for name in PASS_NAMES)
