import json
import logging
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tiny_programs import SMALL_BUCKETS, captured_two_layers, handmade

from mirrorc import ops
from mirrorc.errors import MirrorcError, PassError, VerifyError
from mirrorc.graphs import copied
from mirrorc.pass_manager import Pass, add_passes, after, run_passes
from mirrorc.pass_specs import parse_passes
from mirrorc.passes import PASSES, default_pipeline
from mirrorc.program import Program, Stage
from mirrorc.reproducer import Reproducer
from mirrorc.verifier import Verify


@dataclass(frozen=True)
class Breaks:
    """Raises, or forgets an update."""

    raises: bool = False
    name: str = field(default="breaks", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.UPDATED, init=False)

    def run(self, program: Program) -> Program:
        if self.raises:
            raise KeyError("lost")
        graph = copied(program.mirrored_graph)
        graph.erase_node(next(ops.calls(graph, ops.update)))
        return program.evolve(graph=graph)


def pipeline(**options: bool) -> list[Pass]:
    return add_passes(default_pipeline(**SMALL_BUCKETS), [after("insert-update", Breaks(**options))])


def failure(program: Program, passes: list[Pass], directory: Path | None) -> MirrorcError:
    with pytest.raises(MirrorcError) as caught:
        run_passes(program, passes, [Verify(), Reproducer(passes, directory)])
    return caught.value


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
    assert str(again).partition("\n\nReproduce")[0] == str(error).partition("\n\nReproduce")[0]


def test_the_record_names_error_options_and_versions(tmp_path: Path) -> None:
    failure(handmade(2), pipeline(), tmp_path)
    (path,) = tmp_path.glob("mirrorc-breaks-*/reproducer.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["pass"] == "breaks" and record["error"].startswith(
        "VerifyError: pass 'breaks' gave a program that breaks"
    )
    assert record["pipeline"].startswith("plan-buckets{bucket_cap_mb=1e-06,first_bucket_mb=1e-06},outline-regions")
    assert record["passes"].startswith(f"{__name__}:Breaks,schedule-overlap") and {"torch", "python"} <= set(record)


def test_without_a_directory_it_goes_to_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failure(handmade(2), pipeline(), None)
    assert len(list(tmp_path.glob("mirrorc-breaks-*/program.json.gz"))) == 1


def test_what_cannot_be_written_leaves_the_error_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        error = failure(handmade(2), pipeline(), tmp_path / "file")
    assert "Reproduce" not in str(error) and "no reproducer was written" in caplog.text


def test_a_pipeline_that_works_leaves_nothing(tmp_path: Path) -> None:
    run_passes(handmade(2), default_pipeline(), [Reproducer(default_pipeline(), tmp_path)])
    assert list(tmp_path.iterdir()) == []
