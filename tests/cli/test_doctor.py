import platform
import re
import sys
from importlib.metadata import version
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import mirrorc
from mirrorc.cli import app, self_test
from mirrorc.runtime.codegen.inductor import InductorBackend

run = CliRunner().invoke


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRRORC_DUMP", "/tmp/somewhere")
    monkeypatch.setenv("OMP_NUM_THREADS", "3\x1b")
    monkeypatch.setenv("MY_SECRET", "never shown")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    done = run(app, ["doctor", "--no-self-test"])
    facts = {line[:22].strip(): line[23:] for line in done.stdout.splitlines()}
    assert done.exit_code == 0
    for name in ("mirrorc", "torch", "networkx", "numpy"):
        assert f"{name} {version(name)}" in facts["versions"]
    assert f"Python {platform.python_version()}" in facts["versions"]
    assert f"torch uses {torch.get_num_threads()} thread" in facts["CPUs"]
    assert facts["GPUs"] == "torch sees none" and "gloo is" in facts["between processes"]
    assert facts["dumps of passes"] == "/tmp/somewhere"
    assert r"OMP_NUM_THREADS=3\x1b" in done.stdout and "never shown" not in done.stdout
    assert "self-test" not in done.stdout


def test_a_missing_compiler_and_a_gpu_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        name, total_memory = "A100", 40 * 2**30

    monkeypatch.setattr("mirrorc.torch_internals.cpp_compiler", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Gpu())
    text = run(app, ["doctor", "--no-self-test"]).stdout
    assert re.search(r"^C\+\+ compiler +none: Inductor needs one", text, re.MULTILINE)
    assert re.search(r"^cuda:0 +A100, 40 GiB", text, re.MULTILINE) and "torch sees none" not in text
    monkeypatch.setattr("mirrorc.torch_internals.cpp_compiler", lambda: "/no/such/compiler")
    assert "/no/such/compiler, which does not run" in run(app, ["doctor", "--no-self-test"]).stdout


def test_a_machine_without_torch_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "mirrorc.cli.self_test")
    done = run(app, ["doctor"])
    assert done.exit_code == 1 and re.search(r"^torch +cannot be imported: ", done.stdout, re.MULTILINE)
    assert re.search(r"^self-test +failed: ", done.stdout, re.MULTILINE)


def test_the_self_test_trains_as_plain_pytorch_does() -> None:
    trial = self_test.Trial.of("eager")
    assert not trial.fault and str(trial).startswith("2 steps on cpu:0, cpu:1 train as one device does (")


def test_other_parameters_fail_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    call = mirrorc.Step.__call__

    def with_another_target(step: mirrorc.Step, x: torch.Tensor, target: torch.Tensor) -> Any:
        return call(step, x, target + 1)

    monkeypatch.setattr(mirrorc.Step, "__call__", with_another_target)
    assert re.match(r"failed: parameters differ by \d.*: report this", str(self_test.Trial.of("eager")))


def test_a_backend_that_fails_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the compiler is out of order")

    monkeypatch.setattr(InductorBackend, "compile", fail)
    done = run(app, ["doctor"])
    assert done.exit_code == 1
    assert re.search(r"^self-test, eager +2 steps", done.stdout, re.MULTILINE)
    (failed,) = [line for line in done.stdout.splitlines() if line.startswith("self-test, inductor")]
    assert " failed: " in failed and "the compiler is out of order" in failed and "backend='eager'" in failed


@pytest.mark.slow
def test_all_is_well_here() -> None:
    assert run(app, ["doctor"]).exit_code == 0
