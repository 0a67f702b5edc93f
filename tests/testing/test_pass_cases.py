"""Passes tested by texts, as pytest collects them."""

import os
import re
from pathlib import Path

import pytest

import mirrorc
from mirrorc.testing.pass_cases import check_case

pytest_plugins = ["pytester"]

CASES = Path(__file__).parents[1] / "passes" / "cases"
PROGRAM = """\
# mirrorc · stage CAPTURED · 1 device
# complete form 16 · mirrorc 0.1.0 · torch 2.13.0
{directives}
stage = CAPTURED
devices = [Device(name="cpu:0", torch_device="cpu")]
variables = {{
    "w": Variable(name="w", shape=[3], strides=[1], dtype=f32, role=PARAMETER, update=UpdateRule(label="SGD", group=0)),
}}
arguments = [Argument(name="loss_weight", kind=LOSS_WEIGHT)]
shard_of_replica = [0]

@shard
def one_device(loss_weight: f32[]):
    w: f32[3] = read(variable="w")
    loss: f32[] = aten.sum.default(w)
    at(line="model.py:3  loss = w.sum()")
    d_w: f32[3] = aten.mul.Tensor(w, loss_weight)
    return {{"loss": loss, "gradients": {{"w": d_w}}, "writes": {{}}}}
"""


@pytest.fixture(scope="module", autouse=True)
def all_is_imported() -> None:
    """Runs a case: pytester makes Python forget what was first imported under it, and torch cannot be imported twice."""
    check_case(CASES / "regions" / "outline_regions.mirror")


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.syspath_prepend(pytester.path)
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:  # syrupy's workers report nothing
        monkeypatch.delenv(name)
    return pytester


def write(folder: pytest.Pytester, directives: str, name: str = "case.mirror") -> Path:
    path = folder.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(PROGRAM.format(directives=directives), encoding="utf-8")
    return path


def run(folder: pytest.Pytester, *options: str) -> tuple[int, str]:
    without = (option for plugin in ("cacheprovider", "hypothesispytest") for option in ("-p", f"no:{plugin}"))
    result = folder.runpytest_inprocess(*without, *options)
    return int(result.ret), result.stdout.str() + result.stderr.str()


def test_a_case_is_an_item_and_other_programs_are_none(folder: pytest.Pytester) -> None:
    write(folder, "# RUN: plan-buckets,outline-regions\n# CHECK: d_w: f32[3] = bwd_0[0]\n# CHECK-NEXT: return")
    write(folder, "# no passes", "saved.mirror")
    write(folder, "# remark: nothing", "__snapshots__/test_a.mirror")
    status, output = run(folder, "-v")
    assert status == 0 and "case.mirror::passes PASSED" in output and "1 passed" in output, output


def test_positions_are_left_out_of_what_is_checked(folder: pytest.Pytester) -> None:
    write(folder, "# RUN: plan-buckets\n# CHECK: loss: f32[]\n# CHECK-NEXT: d_w: f32[3]\n# CHECK-NOT: at(")
    assert run(folder)[0] == 0


def test_a_failure_names_file_and_line_and_shows_the_program(folder: pytest.Pytester) -> None:
    write(folder, "# comment\n# RUN: plan-buckets\n# CHECK: loss: f32[]\n# CHECK-NEXT: e_w")
    status, output = run(folder)
    assert status == 1 and "1 failed" in output
    message = (
        "case.mirror: the program is not as line 6 of the check says, 'CHECK-NEXT: e_w': 'e_w' is not there in the"
    )
    assert message in output and "d_w: f32[3] = aten.mul.Tensor(w, loss_weight)" in output, output
    assert "pass_cases.py" not in output and "Traceback" not in output


def test_the_short_form_can_be_checked(folder: pytest.Pytester) -> None:
    write(folder, "# RUN: plan-buckets\n# PRINT: short\n# CHECK: # bucket 0 f32\n# CHECK: w[3]")
    assert run(folder)[0] == 0


BROKEN = "pass 'outline-regions' breaks the rule gradients_and_slots_match"


def test_an_expected_error_passes_and_another_or_none_fails(folder: pytest.Pytester) -> None:
    write(folder, f"# RUN: outline-regions\n# ERROR: {BROKEN}\n# ERROR: there is no bucket plan")
    assert run(folder)[0] == 0
    write(folder, "# RUN: outline-regions\n# ERROR: something else")
    status, output = run(folder)
    assert status == 1 and "the error does not say what line 4 does, 'something else'" in output and BROKEN in output
    write(folder, "# RUN: plan-buckets\n# ERROR: something else")
    status, output = run(folder)
    assert status == 1 and "nothing failed, and line 4 says: something else" in output


def test_an_error_that_is_not_expected_is_shown(folder: pytest.Pytester) -> None:
    write(folder, "# RUN: outline-regions\n# CHECK: bwd_0")
    status, output = run(folder)
    assert status == 1 and f"case.mirror: MC4101: {BROKEN}" in output and "Traceback" not in output


def test_without_passes_the_program_is_verified(folder: pytest.Pytester) -> None:
    path = write(folder, "# RUN:\n# ERROR: d_w is float32[3], but is noted as float32[4]")
    path.write_text(path.read_text(encoding="utf-8").replace("d_w: f32[3]", "d_w: f32[4]"), encoding="utf-8")
    status, output = run(folder)
    assert status == 0, output


@pytest.mark.parametrize(
    ("directives", "message"),
    [
        ("# RUN: plan-bucket\n# CHECK: d_w", "MC4004: there is no pass 'plan-bucket'"),
        ("# RUN: plan-buckets\n# RUN: outline-regions\n# CHECK: d_w", "needs one line '# RUN: PASSES'"),
        ("# RUN: plan-buckets\n# CHECK: d_w\n# ERROR: no", "lines of either '# CHECK:' or '# ERROR:'"),
        ("# RUN: plan-buckets", "MC7201: the check has no directive, so nothing could fail"),
        ("# RUN: plan-buckets\n# PRINT: long\n# CHECK: d_w", "MC7201: line 4 is '# PRINT: long': there is only"),
        ("# RUN: plan-buckets\nstage = NONE\n# CHECK: d_w", "MC7102: cannot read "),
    ],
)
def test_a_case_that_is_wrong_itself_is_refused(folder: pytest.Pytester, directives: str, message: str) -> None:
    write(folder, directives)
    status, output = run(folder)
    assert status == 1 and message in output, output


def test_made_checks_are_renewed_and_others_stay(folder: pytest.Pytester) -> None:
    made = write(folder, "# RUN: plan-buckets\n# UPDATE: @shard\n# CHECK: from before\n# a comment")
    other = write(folder, "# RUN: plan-buckets\n# CHECK: from before", "other.mirror")
    status, output = run(folder, "--snapshot-update")
    assert status == 1 and "1 failed, 1 passed" in output, output
    lines = made.read_text(encoding="utf-8").split("\n")
    assert lines[3:7] == [
        "# UPDATE: @shard",
        "# CHECK: @shard",
        "# CHECK-NEXT: def one_device(loss_weight: f32[]):",
        '# CHECK-NEXT:     w: f32[3] = read(variable="w")',
    ]
    assert "# a comment" in lines and "from before" not in "\n".join(lines)
    assert mirrorc.parse("\n".join(lines))
    assert "# CHECK: from before" in other.read_text(encoding="utf-8")
    assert run(folder, "case.mirror")[0] == 0
    write(folder, "# RUN: plan-buckets\n# UPDATE: @device")
    assert "'# UPDATE: @device', with which no function begins" in run(folder, "case.mirror", "--snapshot-update")[1]


PASS = """
from dataclasses import dataclass

from mirrorc import Program
from mirrorc.ir.program import Stage


@dataclass(frozen=True)
class Remark:
    text: str = ""
    name: str = "remark"
    input_stage: Stage = Stage.CAPTURED
    output_stage: Stage = Stage.CAPTURED

    def run(self, program: Program) -> Program:
        return program.with_remarks(self.text or {}["text"])
"""


def test_a_pass_of_a_user_is_tested_so_and_its_crash_has_a_traceback(folder: pytest.Pytester) -> None:
    (folder.path / "remarks_of_mine.py").write_text(PASS, encoding="utf-8")
    write(folder, "# RUN: remarks_of_mine:Remark{text='hello'}\n# CHECK: hello")
    assert run(folder)[0] == 0
    write(folder, "# RUN: remarks_of_mine:Remark\n# CHECK: hello")
    status, output = run(folder)
    assert status == 1 and "KeyError" in output and 'return program.with_remarks(self.text or {}["text"])' in output


def test_the_page_shows_a_case(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "test-a-schedule.md").read_text(encoding="utf-8")
    (case,) = (
        block for block in re.findall(r"^```\w*\n(.*?)^```$", page, re.DOTALL | re.MULTILINE) if "# RUN:" in block
    )
    path = tmp_path / "case.mirror"
    path.write_text(case, encoding="utf-8")
    check_case(path)
    path.write_text(case.replace("CHECK-NEXT: return", "CHECK-NEXT: yield"), encoding="utf-8")
    with pytest.raises(AssertionError, match="CHECK-NEXT: yield"):
        check_case(path)
