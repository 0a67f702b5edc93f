import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mirrorc.dumps.sinks import DumpFolder

HOLDS = """
import sys
from pathlib import Path
from mirrorc.dumps.sinks import DumpFolder
for _ in range({number}):
    folder = DumpFolder(Path({directory!r}))
    folder.file("01-of-another.txt").write_text("its own")
    print(folder.path.name)
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(directory: Path, number: int) -> Iterator[list[str]]:
    command = [sys.executable, "-c", HOLDS.format(directory=str(directory), number=number)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield list(iter(lambda: process.stdout.readline().strip(), ""))  # type: ignore[union-attr]
        process.communicate(timeout=60)


def names(directory: Path) -> dict[str, set[str]]:
    return {
        folder.name: {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        for folder in directory.iterdir()
    }


def test_the_programs_of_a_process_have_folders_in_order(tmp_path: Path) -> None:
    folders = [DumpFolder(tmp_path / "deep" / "dump").path for _ in range(3)]
    assert folders == [tmp_path / "deep" / "dump" / f"program-{number}" for number in range(3)]
    assert all(folder.is_dir() for folder in folders)


def test_one_directory_is_one_under_every_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "dump", target_is_directory=True)
    assert DumpFolder(tmp_path / "dump").path.name == "program-0"
    assert DumpFolder(tmp_path / "link").path.name == "program-1"


@pytest.mark.slow
def test_a_run_replaces_the_last_one(tmp_path: Path) -> None:
    with another_process(tmp_path, 3) as of_another:
        assert of_another == ["program-0", "program-1", "program-2"]
    assert names(tmp_path) == {name: {"01-of-another.txt"} for name in of_another}
    DumpFolder(tmp_path).file("00-capture.txt").write_text("")
    assert names(tmp_path) == {"program-0": {"00-capture.txt"}}


def test_only_our_files_are_removed(tmp_path: Path) -> None:
    ours = ["00-capture.txt", "00-capture.mirror.gz", "01-plan-buckets.diff", "104-custom.txt", "index.md"]
    others = ["notes.txt", "lowered.mirror.gz", "2-b.txt", "README.md"]
    for name in (*ours, *others):
        for folder in ("program-0", "program-7", "program-old", "mirrorc-replicate-xy"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_text("")
    DumpFolder(tmp_path)
    kept = {*ours, *others}
    assert names(tmp_path) == {
        "program-0": {*others}, "program-7": {*others}, "program-old": kept, "mirrorc-replicate-xy": kept
    }  # fmt: skip


@pytest.mark.slow
def test_processes_that_run_at_the_same_time_have_folders_of_their_own(tmp_path: Path) -> None:
    with another_process(tmp_path, 2) as of_another:
        mine = DumpFolder(tmp_path)
        assert of_another == ["program-0", "program-1"] and mine.path.name == "program-2"
        with another_process(tmp_path, 1) as of_a_third:
            assert of_a_third == ["program-3"]
        assert names(tmp_path)["program-0"] == names(tmp_path)["program-1"] == {"01-of-another.txt"}
        assert DumpFolder(tmp_path).path.name == "program-3"
        assert names(tmp_path)["program-3"] == set()


def test_a_directory_that_somebody_has_removed_is_made_again(tmp_path: Path) -> None:
    folder = DumpFolder(tmp_path / "dump")
    shutil.rmtree(tmp_path / "dump")
    folder.file("index.md").write_text("")
    assert names(tmp_path / "dump") == {"program-0": {"index.md"}}
    assert DumpFolder(tmp_path / "dump").path.name == "program-0"


def test_where_there_are_no_locks_folders_are_still_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrorc.dumps.sinks.fcntl", None)
    assert [DumpFolder(tmp_path).path.name for _ in range(2)] == ["program-0", "program-1"]
