import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "snapshot_tests"


def run_pytest(folder: Path, *options: str) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder), *options]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=200, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "copy", ignore=shutil.ignore_patterns("__pycache__")))


def snapshots(folder: Path) -> dict[str, str]:
    return {
        path.name: path.read_text(encoding="utf-8") for path in (folder / "__snapshots__" / "test_schedule").iterdir()
    }


@pytest.mark.slow
def test_the_example_passes_as_committed() -> None:
    status, output = run_pytest(EXAMPLE, "-v")
    assert status == 0 and "3 snapshots passed" in output and "4 passed" in output, output


@pytest.mark.slow
def test_a_wider_model_fails_by_its_lines_and_the_snapshots_can_be_renewed(copy: Path) -> None:
    source = copy / "test_schedule.py"
    assert "\nWIDTH = 64\n" in source.read_text(encoding="utf-8")
    source.write_text(source.read_text(encoding="utf-8").replace("\nWIDTH = 64\n", "\nWIDTH = 80\n"), encoding="utf-8")
    status, output = run_pytest(copy)
    assert status == 1 and "3 failed, 1 passed" in output, output
    for said in (
        "the program is not as in the snapshot __snapshots__/test_schedule/test_two_devices.mirror",
        " @@ bucket 5\n",
        "-# bucket 0  f32    1.3 KiB",
        "+# bucket 0  f32    1.6 KiB",
        "+#     stem.weight[80, 16]",
    ):
        assert said in output, said
    assert snapshots(copy) == snapshots(EXAMPLE)
    status, output = run_pytest(copy, "--snapshot-update")
    assert status == 0 and "3 snapshots updated" in output, output
    renewed = snapshots(copy)
    assert renewed.keys() == snapshots(EXAMPLE).keys()
    assert all("stem.weight[80, 16]" in text for text in renewed.values())


def test_every_snapshot_of_the_example_is_short_enough_to_read() -> None:
    texts = snapshots(EXAMPLE)
    assert len(texts) == 3 and all(len(text.splitlines()) < 200 for text in texts.values())
