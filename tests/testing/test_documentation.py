import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mirrorc.testing import check

TEXT = (Path(__file__).parent.parent.parent / "docs" / "how-to" / "test-a-schedule.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
CODE = [block for language, block in BLOCKS if language == "python"]
SHOWN = [block for language, block in BLOCKS if not language]
SNAPSHOT = next(block for block in SHOWN if block.startswith("# mirrorc"))


def run_pytest(folder: Path, *options: str) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=200, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_the_page_shows_what_happens(tmp_path: Path) -> None:
    path = tmp_path / "test_training.py"
    path.write_text("\n\n".join(CODE), encoding="utf-8")
    status, output = run_pytest(tmp_path, "--snapshot-update")
    assert status == 0 and "2 passed" in output, output
    written = tmp_path / "__snapshots__" / "test_training" / "test_schedule.mirror"
    assert written.read_text(encoding="utf-8") == SNAPSHOT
    path.write_text(
        path.read_text(encoding="utf-8").replace("compiled().program", "compiled(512, link='copy').program")
    )
    status, output = run_pytest(tmp_path)
    assert status == 1 and "1 failed, 1 passed" in output, output
    (failure,) = (block for block in SHOWN if block.startswith("E "))
    parts = failure.replace("\n        ", " ").split("...\n")
    printed = "\n".join(line.rstrip() for line in output.splitlines())
    assert [part for part in parts if part not in printed] == [] and len(parts) == 3, printed


def test_the_page_shows_what_a_failing_check_says() -> None:
    (failure,) = (block for block in SHOWN if block.startswith("AssertionError: "))
    first, second = re.findall(r"'(CHECK.*?)'", failure)
    with pytest.raises(AssertionError) as caught:
        check(SNAPSHOT, f"# two directives\n{second}\n{first}")
    assert str(caught.value).startswith(failure.removeprefix("AssertionError: ").removesuffix("...\n"))
