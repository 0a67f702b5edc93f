"""Probes that run what is there already: the tests that want a GPU, and the example."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_probes.probe import Failed, Figures, Scene, Skipped, add_probe

ROOT = Path(__file__).resolve().parent.parent.parent
_SUMMARY = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|deselected)")


def output_of(command: Sequence[str], says: str, *, hides_gpus: bool = False) -> str:
    """Runs a command in the repository's folder and gives what it printed; raises `Failed` if it fails.

    Python is told not to look for modules in the folder, where lie folders of mirrorc's name (``-P``).
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if hides_gpus else {})
    printed: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, text=True, errors="replace", env=env, **pipes) as running:  # type: ignore[call-overload]
        for line in running.stdout:
            print(line, end="", flush=True)  # into the log, which stays if time runs out
            printed.append(line.rstrip())
    if running.returncode != 0:
        lines = [line for line in printed if line]
        told = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-1:]
        raise Failed(f"{says} ended with {running.returncode}: {'; '.join(told[:8])}")
    return "\n".join(printed)


def tests(paths: Sequence[str], workers: int = 1, *, hides_gpus: bool = False) -> Figures:
    """Tests, all of them, whatever fails."""
    selected = "not slow and not exhaustive"
    if importlib.util.find_spec("pytest") is None:
        raise Skipped("pytest is not installed")
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-m", selected, "--maxfail=1000", *paths]
    if workers > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(workers), "--dist", "loadscope"]
    found = _SUMMARY.findall(output_of(command, "pytest", hides_gpus=hides_gpus).splitlines()[-1])
    return {what: int(number) for number, what in found}


def cuda_tests(scene: Scene) -> Figures:
    """The tests that run where torch sees a GPU, and those of CUDA graphs."""
    scene.needs_gpu()
    found = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "end_to_end").glob("test_cuda*.py"))
    return tests(found, 6)


def private_apis(scene: Scene) -> Figures:
    """The tests of torch's private APIs, over logical CPUs; a few of them in a rehearsal."""
    path = "tests/torch_internals/test_exports.py" if scene.is_rehearsal else "tests/torch_internals"
    return tests([path], 1 if scene.is_rehearsal else 4, hides_gpus=True)


def train_text(scene: Scene, devices: int) -> Figures:
    """The example that trains a language model."""
    sizes = (
        ["--steps", "2", "--batch", "2", "--backend", "eager", "--max-bytes", "200000"] if scene.is_rehearsal else []
    )
    script, curve = ROOT / "examples" / "train_text.py", scene.out / f"train_text_{devices}.png"
    command = [sys.executable, "-P", str(script), "--devices", *scene.logical(devices), "--curve", str(curve), *sizes]
    text = output_of(command, "train_text.py")
    losses = [line.strip() for line in text.splitlines() if "held-out" in line]
    return {"says": losses[-1] if losses else text.splitlines()[-1]}


def memcheck(scene: Scene) -> Figures:
    """compute-sanitizer's memcheck on a few tests: no error."""
    scene.needs_gpu()
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        raise Skipped("compute-sanitizer is not installed")
    test = "tests/end_to_end/test_cuda.py::test_five_steps_agree_with_one_cpu"
    python = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", test, "-k", "eager"]
    options = ["--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9"]
    text = output_of([checker, *options, *python], "memcheck")
    return {"says": next((line.strip("= ") for line in text.splitlines() if "ERROR SUMMARY" in line), "")}


def add_tests() -> None:
    """Adds the probes of tests."""
    add_probe("correctness", "tests-on-gpus", cuda_tests, 240.0)
    add_probe("correctness", "tests-of-private-apis", private_apis, 240.0)


def add_example() -> None:
    """Adds the probes of the example."""
    for devices in (1, 2):
        add_probe("example", f"train-text-{devices}", functools.partial(train_text, devices=devices), 240.0)
    add_probe("example", "memcheck", memcheck, 240.0)
