"""The command ``doctor``: what a bug report says about the machine, and whether training works on it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from mirrorc.messages.wording import counted, printable

_VARIABLES = (  # what their names begin with
    *("MIRRORC_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TF_CONFIG"),
    *("TORCH", "PYTORCH_", "NCCL_", "GLOO_", "CUDA_", "OMP_", "MKL_", "KMP_", "ATEN_", "CXX"),
)


def doctor(
    no_self_test: Annotated[bool, typer.Option("--no-self-test", help="only describe the machine")] = False,
) -> None:
    """Describes this machine, and tests training.

    Its output belongs into a bug report. Exits with 1 if a test fails.
    """
    for name, fact in _facts():
        sys.stdout.write(printable(f"{name:22} {fact}") + "\n")
    if no_self_test:
        return
    try:
        from mirrorc.cli.self_test import BACKENDS, Trial
    except ImportError as error:
        sys.stdout.write(printable(f"{'self-test':22} failed: {error}") + "\n")
        raise typer.Exit(1) from None
    has_failed = False
    for backend in BACKENDS:
        trial = Trial.of(backend)
        sys.stdout.write(printable(f"{'self-test, ' + backend:22} {trial}") + "\n")
        has_failed |= bool(trial.fault)
    if has_failed:
        raise typer.Exit(1)


def _facts() -> Iterator[tuple[str, str]]:
    """Facts that need no torch come first, because importing torch may fail."""
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    names = ("mirrorc", "torch", "networkx", "numpy", "rich", "typer", "jinja2")
    yield "versions", ", ".join([*map(_version, names), f"Python {platform.python_version()}"])
    yield "system", platform.platform()
    try:
        yield from _facts_of_torch()
    except ImportError as error:
        yield "torch", f"cannot be imported: {error}"
    for name, value in variables.items():
        yield "environment", f"{name}={value}"


def _version(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name} is not installed"


def _facts_of_torch() -> Iterator[tuple[str, str]]:
    import torch

    from mirrorc.torch_internals import cpp_compiler, kernel_folder

    compiler = cpp_compiler()
    yield "C++ compiler", _version_of(compiler) if compiler else "none: Inductor needs one for CPUs"
    usable = f", {len(os.sched_getaffinity(0))} of them for this process" if hasattr(os, "sched_getaffinity") else ""
    yield "CPUs", f"{os.cpu_count()}{usable}; torch uses {counted(torch.get_num_threads(), 'thread')}"
    yield "CPU instructions", torch.backends.cpu.get_cpu_capability()
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    for i, gpu in enumerate(gpus):
        yield f"cuda:{i}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    if not gpus:
        yield "GPUs", "torch sees none"
    yield "between processes", _backends()
    yield "Inductor's cache", str(kernel_folder())
    yield "dumps of passes", os.environ.get("MIRRORC_DUMP") or "none; MIRRORC_DUMP is not set"


def _version_of(compiler: str) -> str:
    try:
        run = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{compiler}, which does not run: {error}"
    return f"{compiler}: {next(iter(run.stdout.splitlines()), 'says no version')}"


def _backends() -> str:
    from torch import distributed

    if not distributed.is_available():
        return "this build of torch has no torch.distributed"
    has = {"gloo": distributed.is_gloo_available(), "NCCL": distributed.is_nccl_available()}
    return ", ".join(f"{name} {'is available' if is_there else 'is not available'}" for name, is_there in has.items())
