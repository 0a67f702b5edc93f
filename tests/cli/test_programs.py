import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_programs import (
    SMALL_BUCKETS,
    TwoLayers,
    Weight,
    captured_model,
    captured_two_layers,
    handmade,
    run_up_to,
)
from torch import nn
from typer.testing import CliRunner

import mirrorc
from mirrorc.cli import app
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_text import format_passes

run = CliRunner().invoke


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "captured.mirror"
    captured_two_layers().save(path)
    return path


def test_help_of_commands_is_not_cut_off() -> None:
    done = run(app, ["--help"])
    assert done.exit_code == 0 and "Compares two programs." in done.stdout
    assert "..." not in done.stdout.replace("[OPTIONS] COMMAND [ARGS]...", "")


def test_a_torch_checkpoint_is_named(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "model.pt")
    done = run(app, ["show", str(tmp_path / "model.pt")])
    assert done.exit_code == 2 and "this is a torch checkpoint, not a program" in done.stderr


def test_opt_names_the_file_to_give_in_place_of_a_lowered_program(tmp_path: Path) -> None:
    lowered = tmp_path / "lowered.mirror.gz"
    run_passes(captured_two_layers(), default_pipeline(**SMALL_BUCKETS)).save(lowered)
    done = run(app, ["opt", str(lowered), "--passes", "replicate"])
    assert done.exit_code == 2 and "is LOWERED already" in done.stderr and "00-capture.mirror.gz" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["show", "diff"])
def test_commands_that_read_programs_import_no_compiler(command: str, captured: Path) -> None:
    script = f"""
import sys
sys.argv = ["mirrorc", "{command}", *[{str(captured)!r}] * {2 if command == "diff" else 1}]
from mirrorc.cli import main
try:
    main()
finally:
    assert not {{"mirrorc.interface", "mirrorc.passes", "mirrorc.runtime", "mirrorc.capture"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_show_prints_a_saved_program(captured: Path) -> None:
    program = captured_two_layers()
    done = run(app, ["show", str(captured)])
    assert done.exit_code == 0 and done.stdout == program.to_text()
    done = run(app, ["show", str(captured), "--slots", "--no-sources", "--regions"])
    assert done.stdout == program.to_text(regions=True, slots=True, sources=False)


@pytest.mark.slow
def test_opt_runs_passes_and_saves(captured: Path, tmp_path: Path) -> None:
    output = tmp_path / "lowered.mirror.gz"
    passes = format_passes(default_pipeline(**SMALL_BUCKETS))
    done = run(app, ["opt", str(captured), "--passes", passes, "--output", str(output)])
    assert done.exit_code == 0, done.output
    expected = run_passes(captured_two_layers(), default_pipeline(**SMALL_BUCKETS))
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
        ("plan-buckets{buckets=-2}", "buckets is -2: give a positive number"),
    ],
)
def test_opt_refuses_what_cannot_run(captured: Path, passes: str, message: str) -> None:
    done = run(app, ["opt", str(captured), "--passes", passes])
    assert done.exit_code == 2 and message in words(done.stderr) and isinstance(done.exception, SystemExit)


@pytest.mark.slow
def test_diff_says_what_differs_and_exits_with_one(captured: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one.mirror", tmp_path / "other.mirror"
    run_up_to("lower-devices", captured_two_layers()).save(one)
    run_up_to("lower-devices", captured_two_layers(), **SMALL_BUCKETS).save(other)
    same = run(app, ["diff", str(one), str(one)])
    assert same.exit_code == 0 and same.stdout == ""
    done = run(app, ["diff", str(one), str(other)])
    assert done.exit_code == 1 and re.search(r"(?m)^@@ .* @@ bucket 0$", done.stdout)


def test_diff_takes_printed_programs(tmp_path: Path) -> None:
    program = run_up_to("lower-devices", captured_two_layers())
    program.save(tmp_path / "saved.mirror")
    printed = tmp_path / "printed.txt"
    printed.write_text(program.to_text(slots=True, sources=False), encoding="utf-8")
    assert run(app, ["diff", str(tmp_path / "saved.mirror"), str(printed)]).exit_code == 0
    printed.write_text(printed.read_text(encoding="utf-8").replace("op=sum", "op=max"), encoding="utf-8")
    assert run(app, ["diff", str(tmp_path / "saved.mirror"), str(printed)]).exit_code == 1


@pytest.mark.slow
def test_diff_compares_what_regions_compute(tmp_path: Path) -> None:
    for name, activation in (("tanh", nn.Tanh()), ("sigmoid", nn.Sigmoid())):
        model = nn.Sequential(nn.Linear(4, 6), activation, nn.Linear(6, 3))
        run_up_to("lower-devices", captured_model(model)).save(tmp_path / f"{name}.mirror.gz")
    done = run(app, ["diff", str(tmp_path / "tanh.mirror.gz"), str(tmp_path / "sigmoid.mirror.gz")])
    assert done.exit_code == 1 and " @@ region fwd_0\n" in done.stdout
    assert "+    _1_sigmoid: f32[4, 6] = aten.sigmoid.default(_0_addmm)\n" in done.stdout


@pytest.mark.slow
def test_a_saved_program_is_equal_to_its_own_print_in_every_form(tmp_path: Path) -> None:
    program = run_up_to("lower-devices", handmade(2, [Weight(f"layer{i}.weight") for i in range(9)], buffer=True))
    saved, printed = tmp_path / "saved.mirror.gz", tmp_path / "printed.txt"
    program.save(saved)
    for regions, slots, sources in itertools.product((False, True), repeat=3):
        printed.write_text(program.to_text(regions=regions, slots=slots, sources=sources), encoding="utf-8")
        for files in ([saved, printed], [printed, saved]):
            done = run(app, ["diff", *map(str, files)])
            assert done.exit_code == 0 and done.stdout == "", (regions, slots, sources)


@pytest.mark.slow
def test_a_saved_program_is_equal_to_the_dump_of_its_last_pass(captured: Path, tmp_path: Path) -> None:
    output, passes = tmp_path / "lowered.mirror.gz", format_passes(default_pipeline(**SMALL_BUCKETS))
    command = ["opt", str(captured), "--passes", passes, "--output", str(output), "--dump", str(tmp_path / "dump")]
    assert run(app, command).exit_code == 0
    (dump,) = (tmp_path / "dump").glob("program-*/*-lower-devices.txt")
    done = run(app, ["diff", str(output), str(dump)])
    assert done.exit_code == 0 and done.stdout == ""
    dump.write_text(dump.read_text(encoding="utf-8").replace("aten.relu", "aten.selu"), encoding="utf-8")
    assert " @@ region fwd_0\n" in run(app, ["diff", str(output), str(dump)]).stdout


def test_verify_checks_every_file(captured: Path, tmp_path: Path) -> None:
    program = run_up_to("lower-devices", captured_two_layers())
    bad = tmp_path / "bad.mirror"
    graph = program.device_graphs["cpu:1"].graph
    graph.erase_node(next(node for node in graph.nodes if node.name.startswith("update")))
    program.save(bad)
    done = run(app, ["verify", str(bad), str(captured)])
    assert done.exit_code == 1 and "every_bucket_is_updated_once" in done.stdout
    assert f"{captured}: CAPTURED, keeps every rule" in done.stdout
    assert run(app, ["verify", str(captured)]).exit_code == 0


COMMANDS = (["show"], ["opt", "--passes", "replicate"], ["verify"], ["diff", __file__])


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_program_is_refused(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "no.mirror").write_text("{}")
    none = tmp_path / "none.mirror"
    for path, reason in (
        (tmp_path / "no.mirror", "it is no program"),
        (none, f"mirrorc: there is no file {none}\n"),
        (tmp_path, f"mirrorc: {tmp_path}: Is a directory\n"),
    ):
        done = run(app, [command[0], str(path), *command[1:]])
        assert done.exit_code == (1 if command == ["verify"] else 2)
        assert reason in done.stderr and isinstance(done.exception, SystemExit)


def test_verify_goes_on_after_what_it_cannot_load(captured: Path, tmp_path: Path) -> None:
    done = run(app, ["verify", str(tmp_path / "missing"), str(captured)])
    assert done.exit_code == 1 and f"there is no file {tmp_path / 'missing'}" in done.stderr
    assert done.stdout == f"{captured}: CAPTURED, keeps every rule\n"


@pytest.fixture
def malformed(tmp_path: Path) -> Path:
    program = captured_two_layers()
    read = next(calls_to(program.shard_graphs[0], ops.read))
    read.kwargs = {}
    program.save(tmp_path / "malformed.mirror")
    return tmp_path / "malformed.mirror"


@pytest.mark.slow
def test_what_cannot_be_printed_is_named(malformed: Path, tmp_path: Path) -> None:
    done = run(app, ["show", str(malformed)])
    assert done.exit_code == 2 and done.stderr == (
        f"mirrorc: MC7104: cannot print {malformed}\n  why:  it is malformed (KeyError: 'variable')\n"
        f"  fix:  mirrorc verify {malformed}, which says what is wrong with it\n"
    )
    assert "breaks the rule" in run(app, ["verify", str(malformed)]).stdout
    for options in ([], ["--dump", str(tmp_path / "dump")], ["--print-after-all"]):
        done = run(app, ["opt", str(malformed), "--passes", "plan-buckets", *options])
        assert done.exit_code == 2 and "breaks the rule" in done.stderr


def words(text: str) -> str:
    """A message without the line breaks and bars that depend on the terminal."""
    return re.sub(r"[\s│]+", " ", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--print-after", "nix"], "--print-after: MC4004: it names 'nix', which is no pass of the pipeline"),
        (
            ["--dump", __file__],
            f"--dump: MC1002: it is '{__file__}', but {__file__} is a file: give a directory, existing or new",
        ),
        (["--dump", f"{__file__}/x"], f"but {__file__} is a file: give a directory"),
        (["--output", f"{__file__}/x.mirror"], f"mirrorc: cannot write {__file__}/x.mirror: "),
        (["--output", str(Path(__file__).parent)], f"mirrorc: cannot write {Path(__file__).parent}: Is a directory"),
        (
            ["--passes", "json:JSONDecoder"],
            "--passes: MC4004: 'json:JSONDecoder' gives a JSONDecoder, which is no pass",
        ),
        (["--import", "not.there"], "'--import': there is no module 'not': run from where it is found"),
    ],
)
def test_options_that_cannot_be_are_refused_in_a_sentence(captured: Path, options: list[str], message: str) -> None:
    done = run(app, ["opt", str(captured), "--passes", "plan-buckets", *options])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert words(message).replace(" ", "") in words(done.stderr).replace(" ", "")  # a path may be broken over lines


@pytest.mark.parametrize("command", COMMANDS)
def test_a_module_that_fails_is_named(
    command: list[str], captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cannot_be_imported.py").write_text("raise RuntimeError('out of order')")
    monkeypatch.chdir(tmp_path)  # where commands look for modules
    monkeypatch.setattr(sys, "path", sys.path.copy())
    done = run(app, [command[0], str(captured), *command[1:], "--import", "cannot_be_imported"])
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit) and "Traceback" not in done.stderr
    assert words("importing cannot_be_imported failed: RuntimeError: out of order") in words(done.stderr)


def in_folder(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mirrorc", *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "999"}
    )


@pytest.mark.slow
def test_operators_of_the_users_are_imported(tmp_path: Path) -> None:
    (tmp_path / "my_operators.py").write_text(
        "import torch\n"
        "library = torch.library.Library('of_the_command_line', 'DEF')\n"
        "library.define('halve(Tensor x) -> Tensor')\n"
        "library.impl('halve', lambda x: x / 2, 'CompositeExplicitAutograd')\n"
    )
    spec = importlib.util.spec_from_file_location("my_operators", tmp_path / "my_operators.py")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    program = captured_two_layers()
    graph = program.shard_graphs[0]
    relu = next(node for node in graph.nodes if node.target is torch.ops.aten.relu.default)
    relu.target = torch.ops.of_the_command_line.halve.default
    program.save(tmp_path / "saved.mirror")
    command = ["opt", "saved.mirror", "--passes", "plan-buckets"]
    done = in_folder(tmp_path, *command)
    assert (
        done.returncode in (1, 2) and "the operator 'of_the_command_line.halve.default' is unknown here" in done.stderr
    )
    assert done.stderr.endswith("import the library that registers it first; on the command line, --import MODULE\n")
    done = in_folder(tmp_path, *command, "--import", "my_operators")
    assert done.returncode == 0, done.stderr
    assert "of_the_command_line.halve" in in_folder(tmp_path, "show", "saved.mirror", "--import", "my_operators").stdout


def test_the_version_is_printed() -> None:
    done = run(app, ["--version"])
    assert done.exit_code == 0 and re.fullmatch(
        rf"mirrorc \d+\.\d+\.\d+, torch {re.escape(torch.__version__)}\n", done.stdout
    )


def test_a_failed_opt_leaves_a_reproducer_only_where_it_is_told_to(
    captured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loses_keys.py").write_text(
        "from mirrorc.ir.program import Stage\n"
        "class Loses:\n"
        "    name, input_stage, output_stage = 'loses', Stage.CAPTURED, Stage.CAPTURED\n"
        "    def run(self, program):\n"
        "        raise RuntimeError('lost my keys')\n"
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    command = ["opt", str(captured), "--passes", "plan-buckets,loses_keys:Loses"]
    done = run(app, command)
    assert done.exit_code == 2 and "pass 'loses' failed" in done.stderr and "Reproduce" not in done.stderr
    assert done.stderr.endswith("\n--dump DIRECTORY keeps what the failing pass was given.\n")
    done = run(app, [*command, "--dump", "kept"])
    (folder,) = (tmp_path / "kept").glob("mirrorc-loses-*")
    assert (
        f"Reproduce it with: mirrorc opt kept/{folder.name}/program.mirror.gz --passes loses_keys:Loses" in done.stderr
    )
    assert "--dump DIRECTORY" not in done.stderr and not list(elsewhere.iterdir())


@pytest.mark.slow
def test_the_command_replays_a_reproducer(tmp_path: Path) -> None:
    """As a user does it: in another process, in the folder of the pass."""
    (tmp_path / "my_passes.py").write_text(
        "from dataclasses import dataclass\n"
        "from mirrorc.ir.program import Stage\n"
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
        mirrorc.plan(
            model,
            {"x": torch.randn(4, 4), "target": torch.tensor([0, 1, 2, 0])},
            2,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=torch.nn.functional.cross_entropy,
            compiler=mirrorc.Compiler(backend="eager", add=[mirrorc.after("pack-gradients", my_passes.Fails())]),
            debug=mirrorc.Debug(dump=tmp_path / "dump"),
        )
    command = (
        str(caught.value).partition("Reproduce it with: ")[2].replace("mirrorc", f"{sys.executable} -m mirrorc", 1)
    )
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "pass 'fails' failed on a PACKED program: RuntimeError: lost my keys" in done.stderr
