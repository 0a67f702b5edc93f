import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tiny_programs import SMALL_BUCKETS, TwoLayers, captured_two_layers, handmade

import mirrorc
from mirrorc.dump_files import DumpFiles, PrintAfter, dump_sinks
from mirrorc.errors import PassError
from mirrorc.pass_manager import Pass, run_passes
from mirrorc.pass_report import PassReport
from mirrorc.passes import PlanBuckets, default_pipeline
from mirrorc.program import Program, Stage

HERE = Path(__file__).parent
NAMES = ["capture", *(compiler_pass.name for compiler_pass in default_pipeline())]


@dataclass(frozen=True)
class DoesNothing:
    name: str = field(default="does-nothing", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)

    def run(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class Fails(DoesNothing):
    name: str = field(default="fails", init=False)

    def run(self, program: Program) -> Program:
        raise RuntimeError("not today")


class Texts(dict[str, str]):
    """A sink that keeps what it is given."""

    def __call__(self, name: str, text: str) -> None:
        self[name] = text


def dumped(passes: list[Pass] | None = None, program: Program | None = None) -> Texts:
    texts = Texts()
    run_passes(program or handmade(2), passes or default_pipeline(**SMALL_BUCKETS), [DumpFiles([texts])])
    return texts


def step_with(**options: object) -> mirrorc.Step:
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


def test_each_pass_has_a_text_and_a_diff_and_there_is_an_index() -> None:
    texts = dumped()
    stems = [f"{i:02d}-{name}" for i, name in enumerate(NAMES)]
    assert [name for name in texts if name.endswith(".txt")] == [f"{stem}.txt" for stem in stems]
    assert {f"{stem}.diff" for stem in stems[1:]} == {name for name in texts if name.endswith(".diff")}
    rows = texts["index.md"].splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {stem}" for stem in stems]
    for name in texts:
        assert name == "index.md" or f"({name})" in texts["index.md"]


def test_a_text_is_headed_with_pass_stage_time_and_counts() -> None:
    heading, counts, *_ = dumped()["06-insert-all-reduce.txt"].splitlines()
    assert re.fullmatch(
        r"# mirrorc · after insert-all-reduce · stage REDUCED · 2 devices · 2 buckets · \d+\.\d ms", heading
    )
    assert re.fullmatch(r"# \d+ nodes \(\+6\): \+2 all_reduce, \+4 wait", counts)


def test_nodes_of_regions_are_counted_too() -> None:
    text = dumped()["03-place-gradients.txt"]
    assert "+2 aten.copy_.default, +2 slot" in text.splitlines()[1]


def test_a_diff_shows_the_lines_that_a_pass_changed() -> None:
    lines = dumped()["06-insert-all-reduce.diff"].splitlines()
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert (
        sum("all_reduce(bucket=" in line for line in added) == 2 and sum("wait(bucket=" in line for line in added) == 4
    )
    assert not [line for line in lines if line.startswith("-") and "pack(" in line]


def test_a_diff_shows_the_regions_that_a_pass_changed() -> None:
    diff = dumped()["03-place-gradients.diff"]
    assert "--- region bwd_0 before" in diff and "aten.copy_.default(slot_" in diff and "region fwd_0" not in diff


def test_remarks_stand_with_the_pass_that_makes_them() -> None:
    texts = dumped()
    assert "# remark of this pass: fc1.weight opens a new bucket" in texts["01-plan-buckets.txt"]
    assert "# note: fc1.weight opens a new bucket" in texts["02-outline-regions.txt"]
    assert "# remark of this pass" not in texts["02-outline-regions.txt"]
    row = next(row for row in texts["index.md"].splitlines() if "plan-buckets" in row)
    assert "fc1.weight opens a new bucket" in row


def test_a_pass_that_changes_nothing_is_not_dumped_in_full() -> None:
    texts = dumped([DoesNothing()])
    assert "# the program is as before" in texts["01-does-nothing.txt"] and "def " not in texts["01-does-nothing.txt"]
    assert "01-does-nothing.diff" not in texts and "as before" in texts["index.md"].splitlines()[-1]
    assert "def one_device" in texts["00-capture.txt"]


def test_a_pass_that_changes_the_stage_alone_is_dumped_in_full() -> None:
    texts = dumped(program=handmade(1))
    assert "def all_devices" in texts["06-insert-all-reduce.txt"]
    assert "# the program is as before" in texts["09-share-parameters.txt"]


def test_the_index_says_which_pass_failed() -> None:
    texts = Texts()
    with pytest.raises(PassError, match="not today"):
        run_passes(handmade(2), [PlanBuckets(), Fails()], [DumpFiles([texts])])
    assert "02-fails, failed: PassError" in texts["index.md"].splitlines()[-1]


def test_the_report_of_a_region_that_came_or_went() -> None:
    program = run_passes(captured_two_layers(), default_pipeline()[:2])
    fewer = program.evolve(regions={"fwd_0": program.regions["fwd_0"]})
    report = PassReport("drops", fewer, program)
    assert report.is_changed and "--- region bwd_0 before" in report.diff()
    assert not PassReport("keeps", program, program).is_changed


def test_files_go_into_a_folder_per_program(tmp_path: Path) -> None:
    with step_with(dump=tmp_path / "deep" / "dump") as step:
        step.prepare(torch.randn(6, 4), target=torch.zeros(6, dtype=torch.int64))
        for number in (0, 1):
            folder = tmp_path / "deep" / "dump" / f"program-{number}"
            assert {f"{i:02d}-{name}.txt" for i, name in enumerate(NAMES)} | {"index.md"} <= {
                path.name for path in folder.iterdir()
            }
        last = (folder / f"{len(NAMES) - 1:02d}-lower-devices.txt").read_text(encoding="utf-8")
        assert str(step.program).partition("def ")[2] in last


def test_without_a_directory_and_a_trace_there_are_no_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrorc.dump_files.is_structured_trace_on", lambda: False)
    assert dump_sinks(None) == []


def test_print_after_prints_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    step_with(print_after=("pack-gradients", "lower-devices")).close()
    out, err = capfd.readouterr()
    assert out == "" and re.findall(r"after (\S+) ·", err) == ["pack-gradients", "lower-devices"]
    assert "\x1b[" not in err
    step_with(print_after_all=True).close()
    assert re.findall(r"after (\S+) ·", capfd.readouterr().err) == NAMES[1:]
    step_with().close()
    assert capfd.readouterr() == ("", "")


def test_print_after_an_unknown_pass_is_refused() -> None:
    with pytest.raises(ValueError, match=r"print_after names 'pack', which is no pass of the pipeline: plan-buckets, "):
        step_with(print_after=("pack",))
    with pytest.raises(
        TypeError, match=r"print_after is 'replicate': give a sequence of names, such as \('replicate',\)"
    ):
        step_with(print_after="replicate")


def test_print_after_is_an_instrument_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    run_passes(handmade(2), default_pipeline(), [PrintAfter(["replicate"])])
    assert "def all_devices():" in capfd.readouterr().err


TRACED = """
import torch
from test_dump_files import step_with
step_with(dump="{dump}").close()
"""


def test_torchs_structured_trace_gets_the_same_artifacts(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", TRACED.format(dump=tmp_path / "dump")],
        env={**os.environ, "TORCH_TRACE": str(tmp_path / "trace"), "PYTHONPATH": str(HERE)},
        check=True,
        timeout=120,
    )
    (log,) = (tmp_path / "trace").glob("*.log")
    found: dict[str, str] = {}
    name = ""
    for line in log.read_text(encoding="utf-8").splitlines():
        if line.startswith("\t"):  # the payload of the record before
            if name:
                found[name] = found.get(name, "") + line[1:] + "\n"
        else:
            name = json.loads(line[line.index("{") :]).get("artifact", {}).get("name", "")
    ours = {name: text for name, text in found.items() if name.startswith("mirrorc_program-0_")}
    files = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "dump" / "program-0").iterdir()}
    assert {f"mirrorc_program-0_{name}" for name in files} == set(ours)
    for name, text in files.items():
        assert ours[f"mirrorc_program-0_{name}"].strip() == text.strip()
