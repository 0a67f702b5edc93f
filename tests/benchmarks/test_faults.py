"""Workers of which one is struck at a random moment: the others name it and end, and a restart goes on bit for bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from worker_processes import ENVIRONMENT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "faults.py"
ROOM = 40.0  # seconds, on a machine that runs other tests


@pytest.mark.parametrize(
    ("kind", "times", "seed"),
    [
        pytest.param("kill", 2, 1, marks=pytest.mark.slow),
        *(pytest.param(kind, 30, 0, marks=pytest.mark.exhaustive) for kind in ("kill", "stop", "raise")),
    ],
)
@pytest.mark.timeout(7200)
def test_whoever_is_struck_is_named_and_a_restart_goes_on(tmp_path: Path, kind: str, times: int, seed: int) -> None:
    options = ["--kinds", kind, "--times", str(times), "--seed", str(seed), "--room", str(ROOM)]
    command = [sys.executable, str(SCRIPT), *options, "--folder", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, start_new_session=True)
    assert done.returncode == 0, done.stdout + done.stderr
    num_late = done.stdout.count("too late: ")
    assert done.stdout.count("as it should be") == times + num_late and num_late <= times // 2, done.stdout
