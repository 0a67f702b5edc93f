"""Scripts that two workers of torchrun run, for tests."""

import os
import subprocess
import sys
from pathlib import Path

from worker_processes import ENVIRONMENT, free_port


def run_by_torchrun(script: str, folder: Path, limit_seconds: float = 200) -> None:
    """Runs ``script FOLDER`` on two workers; a script of this folder."""
    options = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    here = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (here, here.parents[1] / "examples")))
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(here / script), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_seconds)
    assert done.returncode == 0, done.stdout + done.stderr
