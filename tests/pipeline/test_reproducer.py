import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_programs import SMALL_BUCKETS, captured_two_layers, handmade

from mirrorc.errors import MirrorcError, PassError, VerifyError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program, Stage
from mirrorc.passes import PASSES, default_pipeline
from mirrorc.pipeline import reproducer
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_edits import add_passes, after
from mirrorc.pipeline.pipeline_text import parse_passes
from mirrorc.pipeline.protocol import Pass
from mirrorc.pipeline.reproducer import Reproducer
from mirrorc.verifier.verifier import Verify


@dataclass(frozen=True)
class Breaks:
    raises: bool = False
    name: str = field(default="breaks", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.UPDATED, init=False)

    def run(self, program: Program) -> Program:
        if self.raises:
            raise KeyError("lost")
        graph = copied(program.mirrored_graph)
        graph.erase_node(next(calls_to(graph, ops.update)))
        return program.evolve(graph=graph)


@dataclass(frozen=True)
class FailsAt:
    option: Any = None
    name: str = "fails-at"
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.UPDATED, init=False)

    def run(self, program: Program) -> Program:
        _runs.append(self)
        if self.option is not None or len(_runs) == 2:
            raise KeyError("lost")
        return program


_runs: list[Pass] = []


def pipeline(**options: bool) -> list[Pass]:
    return add_passes(default_pipeline(**SMALL_BUCKETS), [after("insert-update", Breaks(**options))])


def failure(program: Program, passes: list[Pass], directory: Path | None) -> MirrorcError:
    with pytest.raises(MirrorcError) as caught:
        run_passes(program, passes, [Verify(), Reproducer(passes, directory)])
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize(("raises", "kind"), [(False, VerifyError), (True, PassError)])
def test_a_failing_pass_can_be_replayed(tmp_path: Path, raises: bool, kind: type[MirrorcError]) -> None:
    error = failure(captured_two_layers(), pipeline(raises=raises), tmp_path / "deep")
    assert isinstance(error, kind)
    found = re.search(r"\n\nReproduce it with: (.*)$", str(error))
    assert found is not None
    command = shlex.split(found[1])
    assert command[:2] == ["mirrorc", "opt"] and command[3] == "--passes"
    folder = Path(command[2]).parent
    assert folder.parent == tmp_path / "deep" and folder.name.startswith("mirrorc-breaks-")
    passes = parse_passes(command[4], PASSES)
    again = failure(Program.load(command[2]), passes, tmp_path / "again")
    said = str(again).partition("\n\nReproduce")[0]
    assert re.sub(r"\n  at:   line \d+ of the program's text", "", said) == str(error).partition("\n\nReproduce")[0]


@pytest.mark.parametrize("is_one_object", [False, True])
def test_of_equal_passes_the_failing_one_is_replayed(tmp_path: Path, is_one_object: bool) -> None:
    _runs.clear()
    first = FailsAt()
    second = first if is_one_object else FailsAt()
    passes = add_passes(default_pipeline(), [after("insert-update", second), after("insert-update", first)])
    failure(handmade(2), passes, tmp_path)
    (path,) = tmp_path.glob("mirrorc-fails-at-*/reproducer.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["passes"].startswith(f"{__name__}:FailsAt,schedule-overlap")
    assert record["pipeline"].count(f"{__name__}:FailsAt") == 2


def test_a_pass_that_has_no_text_is_not_given_a_command(tmp_path: Path) -> None:
    passes = add_passes(default_pipeline(), [after("insert-update", FailsAt(lambda: None))])
    error = failure(handmade(2), passes, tmp_path)
    (path,) = tmp_path.glob("mirrorc-fails-at-*/program.mirror.gz")
    assert "mirrorc opt" not in str(error) and str(error).endswith(
        "The command line cannot replay it: MC4004: the pass 'fails-at' cannot be written as text: its option "
        "'option' is a function: "
        "only numbers, strings, booleans, None, torch's dtypes, and tuples, lists, sets and dicts of them, and plans of "
        "mirrorc.packing, can be written. "
        f"What the pass was given is in {path}: give mirrorc.Program.load() of that to its run()."
    )
    record = json.loads(path.with_name("reproducer.json").read_text(encoding="utf-8"))
    assert record["passes"] is None and "its option 'option' is a function" in record["not_replayed"]
    first = (
        "decompose-gelu,read-row-elements,recompute-elementwise,lay-channels-last,recompute-checkpoints,plan-buckets,"
    )
    assert record["pipeline"].startswith(first)
    assert ",fails-at," in record["pipeline"]
    assert Program.load(path).stage is Stage.UPDATED


def test_a_name_that_no_folder_may_have_is_no_obstacle(tmp_path: Path) -> None:
    failing = FailsAt(option=1, name="a/b c")
    failure(handmade(2), add_passes(default_pipeline(), [after("insert-update", failing)]), tmp_path)
    assert len(list(tmp_path.glob("mirrorc-a_b_c-*/program.mirror.gz"))) == 1


def test_a_later_pass_that_has_no_text_is_left_out(tmp_path: Path) -> None:
    passes = add_passes(pipeline(), [after("schedule-overlap", FailsAt(lambda: None))])
    error = failure(handmade(2), passes, tmp_path)
    assert str(error).endswith(f"--passes {__name__}:Breaks")


def test_a_pass_of_the_script_comes_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = type(sys)("__main__")
    main.__dict__.update(Breaks=Breaks, __file__="/somewhere/train.py")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(Breaks, "__module__", "__main__")
    message = str(failure(handmade(2), pipeline(), tmp_path))
    assert re.search(r"\nReproduce it with: mirrorc opt .* --passes train:Breaks,schedule-overlap,.*\n", message)
    assert message.endswith(
        "\nThis imports the script that defines Breaks: put the pass in a module of its own, or guard what the script does "
        "with if __name__ == '__main__'."
    )


def test_the_record_names_error_options_and_versions(tmp_path: Path) -> None:
    failure(handmade(2), pipeline(), tmp_path)
    (path,) = tmp_path.glob("mirrorc-breaks-*/reproducer.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["pass"] == "breaks" and record["error"].startswith("VerifyError: MC4101: pass 'breaks' breaks")
    not_wanted = [
        f"{name}{{wanted=False}}" for name in ("decompose-gelu", "recompute-elementwise", "lay-channels-last")
    ]
    for_inductor = ",".join([not_wanted[0], "read-row-elements", *not_wanted[1:]])
    assert record["pipeline"].startswith(
        f"{for_inductor},recompute-checkpoints,plan-buckets{{buckets=ByBytes(cap_mb=1e-06, first_mb=1e-06)}},outline-regions"
    )
    assert record["passes"].startswith(f"{__name__}:Breaks,schedule-overlap") and {"torch", "python"} <= set(record)


def test_without_a_directory_it_goes_to_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducer, "tempfile", tempfile)  # not that of the tests
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failure(handmade(2), pipeline(), None)
    assert len(list(tmp_path.glob("mirrorc-breaks-*/program.mirror.gz"))) == 1


def test_what_cannot_be_written_leaves_the_error_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        error = failure(handmade(2), pipeline(), tmp_path / "file")
    assert "Reproduce" not in str(error) and "no reproducer was written" in caplog.text


def test_a_pipeline_that_works_leaves_nothing(tmp_path: Path) -> None:
    run_passes(handmade(2), default_pipeline(), [Reproducer(default_pipeline(), tmp_path)])
    assert list(tmp_path.iterdir()) == []


UNGUARDED = """
from dataclasses import dataclass, field
import torch
import mirrorc
from mirrorc.ir.program import Stage

@dataclass(frozen=True)
class Fails:
    factor: object = 1.0
    name: str = field(default="fails", init=False)
    input_stage: Stage = field(default=Stage.PACKED, init=False)
    output_stage: Stage = field(default=Stage.PACKED, init=False)

    def run(self, program):
        raise RuntimeError("lost my keys")

print("training")
model = torch.nn.Linear(4, 3)
fails = mirrorc.after("pack-gradients", Fails((float("-inf"), torch.float16, "a{b")))
mirrorc.compile(
    model, 2, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=torch.nn.functional.mse_loss,
    compiler=mirrorc.Compiler(backend="eager", add=[fails]), debug=mirrorc.Debug(dump="dump"),
).prepare(torch.ones(4, 4), target=torch.ones(4, 3))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_guarded", [True, False])
def test_the_command_works_or_explains_when_the_pass_is_in_a_script(tmp_path: Path, is_guarded: bool) -> None:
    """As a user does it: the script is run, what it prints is pasted."""
    begin, rest = UNGUARDED.split("print(", 1)
    guarded = f"{begin}if __name__ == '__main__':\n    print(" + rest.replace("\n", "\n    ")
    (tmp_path / "train.py").write_text(guarded if is_guarded else UNGUARDED)
    python = [sys.executable, "-m", "mirrorc"]
    failed = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    found = re.search(r"\nReproduce it with: mirrorc (.*)\nThis imports the script that defines Fails: ", failed.stderr)
    assert found is not None, failed.stderr
    command = [*python, *shlex.split(found[1])]
    environment = {**os.environ, "COLUMNS": "9999"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "lost my keys" in done.stderr
    explanation = (
        "importing train failed: PassError: MC4001: pass 'fails' failed on a PACKED program: RuntimeError: lost my keys\n"
        "  fix:  put the pass in a module of its own\n"
    )
    assert (explanation in done.stderr) is not is_guarded
    assert ("training" in done.stdout) is not is_guarded
