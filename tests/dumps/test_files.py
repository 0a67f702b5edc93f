import errno
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_programs import (
    SMALL_BUCKETS,
    FunctionPass,
    TwoLayers,
    captured_two_layers,
    core_pipeline,
    handmade,
    run_up_to,
    sgd_step,
    targets,
)
from typer.testing import CliRunner

import mirrorc
from mirrorc.cli import app
from mirrorc.compilation.instruments import instruments_for
from mirrorc.dumps.files import DumpFiles, PassReport, PrintAfter
from mirrorc.dumps.sinks import Sink, dump_sinks
from mirrorc.errors import PassError, VerifyError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.program import Program, Stage
from mirrorc.options import step_options
from mirrorc.passes import PlanBuckets, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Instrument, Pass
from mirrorc.verifier.verifier import Verify

SUPPORT = Path(__file__).parents[1] / "support"
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
    name: str = "fails"

    def run(self, program: Program) -> Program:
        raise RuntimeError("not today")


acts = partial(FunctionPass, name="acts", input_stage=Stage.UPDATED, output_stage=Stage.UPDATED)


class Texts(dict[str, str], Sink):
    def write(self, name: str, text: str) -> None:
        self[name] = text

    def of(self, name: str) -> str:
        (found,) = (text for key, text in self.items() if key.partition("-")[2] == name)
        return found

    def rows(self) -> list[list[str]]:
        return [row.removeprefix("| ").removesuffix(" |").split(" | ") for row in self["index.md"].splitlines()[2:]]


def dumped(passes: list[Pass] | None = None, program: Program | None = None) -> Texts:
    texts = Texts()
    run_passes(program or handmade(2), passes or default_pipeline(**SMALL_BUCKETS), [DumpFiles([texts])])
    return texts


def step_with(**options: object) -> mirrorc.Step:
    step = sgd_step(TwoLayers(), loss_fn=torch.nn.functional.cross_entropy, **options)
    step.prepare(torch.randn(4, 4), target=torch.tensor([0, 1, 2, 0]))
    return step


def test_each_pass_has_a_text_and_a_diff_and_there_is_an_index() -> None:
    texts = dumped()
    stems = [f"{i:02d}-{name}" for i, name in enumerate(NAMES)]
    assert [name for name in texts if name.endswith(".txt")] == [f"{stem}.txt" for stem in stems]
    changed = [name for name, _, _, nodes, *_ in texts.rows()[1:] if nodes != "as before"]
    assert [f"{stem}.diff" for stem in changed] == [name for name in texts if name.endswith(".diff")]
    assert len(changed) > 8
    rows = texts["index.md"].splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| {stem}" for stem in stems]
    for name in texts:
        assert name == "index.md" or f"({name})" in texts["index.md"]


def test_a_text_is_headed_with_pass_stage_time_and_counts() -> None:
    heading, counts, *_ = dumped().of("insert-all-reduce.txt").splitlines()
    assert re.fullmatch(
        r"# mirrorc · after insert-all-reduce · stage REDUCED · 2 devices · 2 buckets · \d+\.\d ms", heading
    )
    assert re.fullmatch(r"# \d+ nodes \(\+6\): \+2 all_reduce, \+4 wait", counts)


def test_nodes_of_regions_are_counted_too() -> None:
    text = dumped().of("place-gradients.txt")
    assert "+2 aten.copy_.default, +2 slot" in text.splitlines()[1]


def test_a_diff_shows_the_lines_that_a_pass_changed() -> None:
    lines = dumped().of("insert-all-reduce.diff").splitlines()
    added = [line for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert (
        sum("all_reduce(bucket=" in line for line in added) == 2 and sum("wait(bucket=" in line for line in added) == 2
    )
    assert not [line for line in lines if line.startswith("-") and "pack(" in line]


def test_a_diff_shows_the_regions_that_a_pass_changed() -> None:
    diff = dumped().of("place-gradients.diff")
    assert "--- region bwd_0 before" in diff and "aten.copy_.default(slot_" in diff and "region fwd_0" not in diff


def test_remarks_stand_with_the_pass_that_makes_them() -> None:
    texts = dumped()
    assert "# remark of this pass: fc1.weight opens a new bucket" in texts.of("plan-buckets.txt")
    assert "# remark of this pass: 2 pieces of backward" in texts.of("outline-regions.txt")
    for name in ("outline-regions.txt", "lower-devices.txt"):
        assert "# remark: plan-buckets: 2 gradients in 2 buckets" in texts.of(name)
        assert "# remark of this pass: 2 gradients" not in texts.of(name) and "opens a new bucket" not in texts.of(name)
    assert "pieces of backward" not in texts.of("replicate.txt")  # of interest in the dump of its own pass alone
    row = next(row for row in texts["index.md"].splitlines() if "plan-buckets" in row)
    assert "fc1.weight opens a new bucket" in row


def test_a_pass_that_changes_nothing_is_not_dumped_in_full() -> None:
    texts = dumped([DoesNothing()])
    assert "# the program is as before" in texts["01-does-nothing.txt"] and "def " not in texts["01-does-nothing.txt"]
    assert "01-does-nothing.diff" not in texts and "as before" in texts["index.md"].splitlines()[-1]
    assert "def one_device" in texts["00-capture.txt"]


def test_a_pass_that_changes_the_stage_alone_is_dumped_in_full() -> None:
    texts = dumped(program=handmade(1))
    assert "def all_devices" in texts.of("insert-all-reduce.txt")
    assert "# the program is as before" in texts.of("share-parameters.txt")


def test_the_index_says_which_pass_failed() -> None:
    texts = Texts()
    with pytest.raises(PassError, match="not today"):
        run_passes(handmade(2), [PlanBuckets(), Fails()], [DumpFiles([texts])])
    name, stage, *_, remarks, files = texts.rows()[-1]
    assert (name, stage, files) == ("02-fails, failed: PassError", "", "")
    assert remarks.startswith(
        "MC4001: pass 'fails' failed on a CAPTURED program: RuntimeError: not today<br>  fix:  of a pass"
    )


def test_of_passes_of_one_name_the_one_that_failed_is_noted() -> None:
    texts = Texts()
    with pytest.raises(PassError):
        run_passes(handmade(2), [DoesNothing(), Fails(name="does-nothing")], [DumpFiles([texts])])
    assert [row[0] for row in texts.rows()[1:]] == ["01-does-nothing", "02-does-nothing, failed: PassError"]


@pytest.mark.slow
def test_the_index_says_which_pass_could_not_take_the_program(tmp_path: Path) -> None:
    with pytest.raises(PassError, match="add a pass that gives REPLICATED") as caught:
        passes = [one for one in default_pipeline() if one.name != "replicate"]
        run_passes(
            captured_two_layers(),
            passes,
            instruments_for(passes, tmp_path, ()),
        )
    index = (tmp_path / "program-0" / "index.md").read_text(encoding="utf-8")
    assert re.search(r"\| \d\d-pack-gradients, failed: PassError \|.* takes programs from REPLICATED to PACKED", index)
    assert "Reproduce it with: mirrorc opt " in str(caught.value)
    assert len(list(tmp_path.glob("mirrorc-pack-gradients-*/reproducer.json"))) == 1


@pytest.mark.slow
def test_the_index_says_that_the_captured_program_was_refused() -> None:
    texts, program = Texts(), captured_two_layers()
    targets(program.shard_graphs[0], ops.read)[0].kwargs = {"variable": "gone"}
    with pytest.raises(VerifyError):
        run_passes(program, [PlanBuckets()], [DumpFiles([texts]), Verify()])
    assert [row[0] for row in texts.rows()] == ["00-capture, failed: VerifyError"]
    assert "gone" in texts.rows()[0][4]


def without_bucket(program: Program) -> Program:
    program = program.evolve(graph=copied(program.mirrored_graph))
    targets(program.mirrored_graph, ops.update)[0].kwargs = {"replica": 0}
    return program


def with_odd_output(program: Program) -> Program:
    program = program.evolve(graph=copied(program.mirrored_graph))
    program.mirrored_graph.output_node().args = ({},)
    return program


def without_output(program: Program) -> Program:
    program = program.evolve(graph=copied(program.mirrored_graph))
    program.mirrored_graph.erase_node(program.mirrored_graph.output_node())
    return program


def with_foreign_node(program: Program) -> Program:
    other = copied(program.mirrored_graph)
    program = program.evolve(graph=copied(program.mirrored_graph))
    targets(program.mirrored_graph, ops.update)[0].args = (targets(other, ops.wait)[0],)
    return program


def without_devices(program: Program) -> Program:
    return program.evolve(devices=())


def without_buckets(program: Program) -> Program:
    return program.evolve(buckets=())


BREAKS = [without_bucket, with_odd_output, without_output, with_foreign_node, without_devices, without_buckets]


@pytest.mark.slow
@pytest.mark.parametrize("action", BREAKS, ids=lambda action: action.__name__)
def test_looking_at_a_broken_program_does_not_hide_what_the_verifier_says(
    action: Callable[[Program], Program], capfd: pytest.CaptureFixture[str]
) -> None:
    program = run_up_to("insert-update", captured_two_layers(), **SMALL_BUCKETS)

    def error(*instruments: Instrument) -> str:
        with pytest.raises(VerifyError) as caught:
            run_passes(program, [acts(action)], [*instruments, Verify()])
        return str(caught.value)

    texts = Texts()
    assert error(DumpFiles([texts]), PrintAfter(None)) == error()
    assert [row[0] for row in texts.rows()] == ["00-given", "01-acts, failed: VerifyError"]
    assert texts["01-acts.txt"].startswith("# mirrorc · after acts · stage UPDATED")
    assert "breaks the rule" in texts.rows()[-1][4]
    assert "# mirrorc · after acts · stage UPDATED" in capfd.readouterr().err


def test_a_program_that_cannot_be_printed_has_the_reason_in_its_place() -> None:
    program = run_up_to("insert-update", captured_two_layers())
    report = PassReport("acts", program.evolve(buckets=(None,)), program, 1.0)
    assert report.is_changed and "# this program cannot be printed: " in report.text()
    assert report.diff().startswith("# no diff: a program cannot be printed: ") and "nodes" in report.counts()
    report = PassReport("acts", program.evolve(regions={"fwd_0": None}), program, 1.0)
    assert report.counts().startswith("cannot be counted: AttributeError")


def test_a_remark_is_one_cell_of_the_index_and_one_line_of_the_text() -> None:
    texts = Texts()

    def remark(program: Program) -> Program:
        return program.evolve(remarks=(*program.remarks, "a|b\nc<d>"))

    def fail(program: Program) -> Program:
        raise ValueError("one | two\nthree")

    program = run_up_to("insert-update", captured_two_layers())
    with pytest.raises(PassError):
        run_passes(program, [acts(remark), acts(fail, name="fails/not in a folder")], [DumpFiles([texts])])
    assert [len(row) for row in texts.rows()] == [6, 6, 6]
    assert texts.rows()[1][4] == "a\\|b<br>c\\<d>"
    assert texts.rows()[2][0] == "02-fails_not_in_a_folder, failed: PassError"
    assert "ValueError: one \\| two<br>three<br>  fix:  " in texts.rows()[2][4]
    assert "# remark of this pass: a|b\\nc<d>\n" in texts["01-acts.txt"]


@pytest.mark.slow
def test_the_captured_program_is_saved_for_the_command_line(tmp_path: Path) -> None:
    with step_with(dump=tmp_path) as step:
        text = str(step.program)
    captured = tmp_path / "program-0" / "00-capture.mirror.gz"
    assert "[program](00-capture.mirror.gz)" in (captured.parent / "index.md").read_text(encoding="utf-8")
    done = CliRunner().invoke(app, ["opt", str(captured), "--passes", ",".join(NAMES[1:])])
    assert done.exit_code == 0, done.output
    assert without_sources(done.stdout) == without_sources(text)


def test_the_dump_of_a_program_that_was_given_says_so(tmp_path: Path) -> None:
    program = run_passes(captured_two_layers(), default_pipeline()[:3])
    run_passes(program, [DoesNothing()], [DumpFiles(dump_sinks(tmp_path))])
    given = (tmp_path / "program-0" / "index.md").read_text(encoding="utf-8").splitlines()[2]
    assert given.startswith("| 00-given |") and (tmp_path / "program-0" / "00-given.mirror.gz").exists()


def without_sources(text: str) -> list[str]:
    return [line.partition("  # ")[0].rstrip() for line in text.splitlines()]


def test_a_captured_program_that_cannot_be_saved_is_dumped_all_the_same(tmp_path: Path) -> None:
    program = captured_two_layers()
    graph = program.shard_graphs[0]
    with graph.inserting_before(graph.output_node()):
        graph.call_function(lambda: None)
    run_passes(program, [DoesNothing()], [DumpFiles(dump_sinks(tmp_path))])
    capture, nothing = (tmp_path / "program-0" / "index.md").read_text(encoding="utf-8").splitlines()[2:]
    assert "the program cannot be saved: " in capture and "[program]" not in capture
    assert nothing.startswith("| 01-does-nothing |")
    assert not (tmp_path / "program-0" / "00-capture.mirror.gz").exists()


def test_the_report_of_a_region_that_came_or_went() -> None:
    program = run_passes(captured_two_layers(), core_pipeline()[:2])
    fewer = program.evolve(regions={"fwd_0": program.regions["fwd_0"]})
    report = PassReport("drops", fewer, program)
    assert report.is_changed and "--- region bwd_0 before" in report.diff()
    assert not PassReport("keeps", program, program).is_changed


@pytest.mark.slow
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


def trained_with_a_dump(directory: Path) -> list[str]:
    model = TwoLayers()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sgd_step(model, 2, loss_fn=torch.nn.functional.mse_loss, dump=directory) as step:
            before = [p.detach().clone() for p in model.parameters()]
            for num_examples in (4, 6):
                step(torch.ones(num_examples, 4), target=torch.zeros(num_examples, 3))
    assert not all(map(torch.equal, before, model.parameters()))
    return [str(warning.message) for warning in caught if warning.filename == __file__]


@pytest.mark.slow
def test_a_dump_that_cannot_be_written_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file_in_its_place = tmp_path / "dump"
    monkeypatch.setattr(step_options, "checked_directory", lambda option, path: Path(path))
    file_in_its_place.write_text("")
    said = trained_with_a_dump(file_in_its_place)
    assert len(said) == 2 and all("dump" in text and "training goes on without it" in text for text in said)

    write_text, written = Path.write_text, []

    def until_the_disk_is_full(path: Path, *args: object, **kwargs: object) -> int:
        if len(written) >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        written.append(path)
        return write_text(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", until_the_disk_is_full)
    said = trained_with_a_dump(tmp_path / "full")
    assert len(said) == 2 and all("No space left on device" in text for text in said), "one for each program"


def test_without_a_directory_and_a_trace_there_are_no_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrorc.dumps.sinks.is_structured_trace_on", lambda: False)
    assert dump_sinks(None) == []


@pytest.mark.slow
def test_print_after_prints_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    step_with(print_after=("pack-gradients", "lower-devices")).close()
    out, err = capfd.readouterr()
    assert out == "" and re.findall(r"after (\S+) ·", err) == ["pack-gradients", "lower-devices"]
    assert "\x1b[" not in err
    step_with(print_after="all").close()
    assert re.findall(r"after (\S+) ·", capfd.readouterr().err) == NAMES[1:]
    step_with().close()
    assert capfd.readouterr() == ("", "")


def test_print_after_an_unknown_pass_is_refused() -> None:
    named = r"print_after names 'pack', which is no pass of the pipeline\n  fix:  did you mean 'pack-gradients'"
    with pytest.raises(ValueError, match=named):
        step_with(print_after=("pack",))
    with pytest.raises(
        ValueError, match=r"print_after is 'replicate': give a sequence of names, such as \('replicate',\), or 'all'"
    ):
        step_with(print_after="replicate")


def test_print_after_is_an_instrument_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    run_passes(handmade(2), default_pipeline(), [PrintAfter(["replicate"])])
    assert "def all_devices():" in capfd.readouterr().err


TRACED = """
import torch
from test_files import step_with
step_with(dump="{dump}").close()
"""


@pytest.mark.slow
def test_torchs_structured_trace_gets_the_same_artifacts(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", TRACED.format(dump=tmp_path / "dump")],
        env={
            **os.environ,
            "TORCH_TRACE": str(tmp_path / "trace"),
            "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{SUPPORT}",
        },
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
    written = [path for path in (tmp_path / "dump" / "program-0").iterdir() if path.suffix in (".txt", ".diff", ".md")]
    files = {path.name: path.read_text(encoding="utf-8") for path in written}
    assert {f"mirrorc_program-0_{name}" for name in files} == set(ours)
    for name, text in files.items():
        assert ours[f"mirrorc_program-0_{name}"].strip() == text.strip()
