import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_programs import SMALL_BUCKETS, TwoLayers, captured_two_layers, run_up_to
from typer.testing import CliRunner

import mirrorc
from mirrorc.cli import app
from mirrorc.pass_specs import format_passes
from mirrorc.passes import default_pipeline

run = CliRunner().invoke


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "captured.json"
    captured_two_layers().save(path)
    return path


def test_show_prints_a_saved_program(captured: Path) -> None:
    program = captured_two_layers()
    done = run(app, ["show", str(captured)])
    assert done.exit_code == 0 and done.stdout == program.to_text()
    done = run(app, ["show", str(captured), "--slots", "--no-sources", "--regions"])
    assert done.stdout == program.to_text(regions=True, slots=True, sources=False)


def test_opt_runs_passes_and_saves(captured: Path, tmp_path: Path) -> None:
    output = tmp_path / "lowered.json.gz"
    passes = format_passes(default_pipeline(**SMALL_BUCKETS))
    done = run(app, ["opt", str(captured), "--passes", passes, "--output", str(output)])
    assert done.exit_code == 0, done.output
    expected = captured_two_layers()
    for compiler_pass in default_pipeline(**SMALL_BUCKETS):
        expected = compiler_pass.run(expected)
    assert done.stdout == expected.to_text() == mirrorc.Program.load(output).to_text()


def test_opt_dumps_and_prints_after_passes(captured: Path, tmp_path: Path) -> None:
    command = ["opt", str(captured), "--passes", "plan-buckets,outline-regions", "--dump", str(tmp_path)]
    done = run(app, [*command, "--print-after", "plan-buckets"])
    assert done.exit_code == 0, done.output
    assert "after plan-buckets ·" in done.stderr and "after outline-regions ·" not in done.stderr
    (folder,) = tmp_path.iterdir()
    assert (folder / "02-outline-regions.txt").exists()
    assert "after outline-regions ·" in run(app, [*command, "--print-after-all"]).stderr


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ("plan-bucket", "there is no pass 'plan-bucket'"),
        ("replicate", "takes programs from OUTLINED to REPLICATED"),
        ("plan-buckets{bucket_cap_mb=0}", "bucket_cap_mb is 0: give a positive number"),
    ],
)
def test_opt_refuses_what_cannot_run(captured: Path, passes: str, message: str) -> None:
    done = run(app, ["opt", str(captured), "--passes", passes])
    words = re.sub(r"[\s│]+", " ", done.stderr)
    assert done.exit_code == 2 and message in words and "Traceback" not in done.output


def test_diff_says_what_differs_and_exits_with_one(captured: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    run_up_to("lower-devices", captured_two_layers()).save(one)
    run_up_to("lower-devices", captured_two_layers(), **SMALL_BUCKETS).save(other)
    same = run(app, ["diff", str(one), str(one)])
    assert same.exit_code == 0 and same.stdout == ""
    done = run(app, ["diff", str(one), str(other)])
    assert done.exit_code == 1 and "bucket" in done.stdout.splitlines()[0] and "\n@@ " in done.stdout


def test_diff_takes_printed_programs(tmp_path: Path) -> None:
    program = run_up_to("lower-devices", captured_two_layers())
    program.save(tmp_path / "saved.json")
    printed = tmp_path / "printed.txt"
    printed.write_text(program.to_text(slots=True, sources=False), encoding="utf-8")
    assert run(app, ["diff", str(tmp_path / "saved.json"), str(printed)]).exit_code == 0
    printed.write_text(printed.read_text(encoding="utf-8").replace("op=sum", "op=max"), encoding="utf-8")
    assert run(app, ["diff", str(tmp_path / "saved.json"), str(printed)]).exit_code == 1


def test_verify_checks_every_file(captured: Path, tmp_path: Path) -> None:
    program = run_up_to("lower-devices", captured_two_layers())
    bad = tmp_path / "bad.json"
    graph = program.device_graphs["cpu:1"].graph
    graph.erase_node(next(node for node in graph.nodes if node.name.startswith("update")))
    program.save(bad)
    done = run(app, ["verify", str(bad), str(captured)])
    assert done.exit_code == 1 and "every_bucket_is_updated_once" in done.stdout
    assert f"{captured}: CAPTURED, keeps every rule" in done.stdout
    assert run(app, ["verify", str(captured)]).exit_code == 0


@pytest.mark.parametrize("command", [["show"], ["opt", "--passes", "replicate"], ["verify"], ["diff", __file__]])
def test_what_is_no_program_is_refused(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    for path, reason in ((tmp_path / "no.json", "no mirrorc program"), (tmp_path / "none.json", "No such file")):
        done = run(app, [command[0], str(path), *command[1:]])
        assert done.exit_code == 2 and reason in done.stderr and "Traceback" not in done.output


def test_the_command_replays_a_reproducer(tmp_path: Path) -> None:
    """As a user does it: in another process, in the folder of the pass."""
    (tmp_path / "my_passes.py").write_text(
        "from dataclasses import dataclass\n"
        "from mirrorc.program import Stage\n"
        "@dataclass(frozen=True)\n"
        "class Fails:\n"
        "    name: str = 'fails'\n"
        "    input_stage: Stage = Stage.PACKED\n"
        "    output_stage: Stage = Stage.PACKED\n"
        "    def run(self, program):\n"
        "        raise RuntimeError('lost my keys')\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import my_passes
    finally:
        sys.path.remove(str(tmp_path))
    model = TwoLayers()
    with pytest.raises(mirrorc.PassError) as caught:
        mirrorc.compile(
            model,
            2,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=torch.nn.functional.cross_entropy,
            backend="eager",
            dump=tmp_path / "dump",
            add_passes=[mirrorc.after("pack-gradients", my_passes.Fails())],
            example_inputs=((torch.randn(4, 4),), {"target": torch.tensor([0, 1, 2, 0])}),
        )
    command = (
        str(caught.value).partition("Reproduce it with: ")[2].replace("mirrorc", f"{sys.executable} -m mirrorc.cli", 1)
    )
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "pass 'fails' failed on a PACKED program: RuntimeError: lost my keys" in done.stderr
