"""What a compilation that takes long says: where, and that nothing stays of it."""

import contextlib
import io
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.live import Live
from tiny_programs import sgd_step
from torch import nn
from tqdm import tqdm

import mirrorc
from mirrorc.compilation import progress
from mirrorc.compilation.progress import free_terminal
from mirrorc.ir.program import Program, Region, Stage
from mirrorc.runtime.codegen.regions import RegionCompiler, RegionFunction

SHOWS_CURSOR = "\x1b[?25h"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass(frozen=True)
class Gate:
    action: Callable[[], object]
    name: str = "gate"
    input_stage = output_stage = Stage.CAPTURED

    def run(self, program: Program) -> Program:
        self.action()
        return program


def until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not is_reached():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def progress_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mirrorc progress"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream, stdout=sys.stdout, modules=sys.modules))
    yield stream
    assert not progress_threads()


def compiled(action: Callable[[], object], size: int = 4, **options: Any) -> mirrorc.step.Step:
    gate = mirrorc.before("plan-buckets", Gate(action))
    step = sgd_step(nn.Linear(3, 1), **{"add": [gate], "loss_fn": nn.functional.mse_loss, **options})
    step(torch.ones(size, 3), target=torch.ones(size, 1))
    return step


@pytest.mark.slow
def test_a_line_on_a_terminal_says_what_is_done_and_goes_away(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    def action() -> None:
        until(lambda: "compiling Linear for cpu:0, cpu:1: passes, " in terminal.getvalue())

    compiled(action)
    assert terminal.getvalue().rstrip().endswith(("\x1b[2K", SHOWS_CURSOR)) and SHOWS_CURSOR in terminal.getvalue()
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_the_line_counts_the_regions_that_are_compiled(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_one, done = RegionCompiler.compile, []

    def compile_when_told(regions: RegionCompiler, region: Region, device: torch.device) -> RegionFunction:
        until(lambda: f"cpu:1: regions, {len(done)} of 4, " in terminal.getvalue())
        done.append(region.name)
        return compile_one(regions, region, device)

    monkeypatch.setattr(RegionCompiler, "compile", compile_when_told)
    compiled(lambda: None)
    assert sorted(done) == ["bwd_0", "bwd_0", "fwd_0", "fwd_0"]  # forward and backward, on two devices


@pytest.mark.slow
def test_a_later_call_says_what_is_new(terminal: Terminal, caplog: pytest.LogCaptureFixture) -> None:
    is_waiting = threading.Event()
    changes = "(input f32[6, 3], was f32[4, 3]; target f32[6, 1], was f32[4, 1])"
    step = compiled(lambda: is_waiting.is_set() and until(lambda: changes[:20] in terminal.getvalue()))
    is_waiting.set()
    with caplog.at_level(logging.INFO, "mirrorc.compilation.step_compiler"):
        step(torch.ones(6, 3), target=torch.ones(6, 1))
    assert f"compiling Linear for cpu:0, cpu:1 {changes}, for a shard" in caplog.text


@pytest.mark.slow
def test_elsewhere_one_line_of_the_log_says_it(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    caplog.set_level(logging.INFO, "mirrorc.compilation.progress")
    compiled(lambda: until(lambda: bool(caplog.records)))
    assert [record.name for record in caplog.records] == ["mirrorc.compilation.progress"]
    assert re.search(r"compiling Linear for cpu:0, cpu:1: .* s \(the first call\), and goes on", caplog.text)
    assert terminal.getvalue() == ""


@pytest.mark.slow
def test_elsewhere_one_line_of_standard_error_says_it_when_it_takes_longer(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    monkeypatch.setattr(progress, "PATIENCE_ELSEWHERE_SECONDS", 1e6)
    compiled(lambda: None)
    monkeypatch.setattr(progress, "PATIENCE_ELSEWHERE_SECONDS", 0.0)
    compiled(lambda: None, progress=False)
    assert terminal.getvalue() == ""
    notice = r"mirrorc: compiling Linear for cpu:0, cpu:1, \d+ s so far; "
    compiled(lambda: until(lambda: bool(terminal.getvalue())))
    assert re.fullmatch(f"{notice}the first call compiles\n", terminal.getvalue())
    terminal.truncate(0)
    is_second = threading.Event()
    step = compiled(lambda: until(lambda: "a call compiles" in terminal.getvalue() or not is_second.is_set()))
    is_second.set()
    step(torch.ones(6, 3), target=torch.ones(6, 1))
    last = terminal.getvalue().splitlines()[-1]
    assert re.fullmatch(f"{notice}a call compiles that is new: input f32\\[6, 3\\], was f32\\[4, 3\\]; .*", last)


@pytest.mark.slow
def test_without_progress_and_beside_bars_of_the_user_there_is_no_thread(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[threading.Thread] = []
    compiled(lambda: found.extend(progress_threads()), progress=False)
    monkeypatch.setattr(progress, "free_terminal", lambda: None)
    compiled(lambda: found.extend(progress_threads()))
    assert not found and terminal.getvalue() == ""


def test_displays_of_the_user_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with contextlib.redirect_stderr(Terminal()) as stream:
        assert free_terminal() is stream
        with tqdm(total=3, file=stream):
            assert free_terminal() is None
        assert free_terminal() is stream
        with Live("mine", console=Console(file=stream), auto_refresh=False):
            assert free_terminal() is None
        assert free_terminal() is stream
        monkeypatch.setenv("TERM", "dumb")
        assert free_terminal() is None
    closed = Terminal()
    closed.close()
    closed.isatty = io.StringIO().isatty  # type: ignore[method-assign]
    for other in (None, object(), io.StringIO(), closed):
        with contextlib.redirect_stderr(other):  # type: ignore[type-var]
            assert free_terminal() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("where", ["capture", "passes"])
def test_an_exception_ends_the_line_and_the_thread(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], where: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        until(lambda: f": {where}" in terminal.getvalue())
        if error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        raise error

    if where == "capture":
        monkeypatch.setattr(mirrorc.compilation.step_compiler, "capture_program", fail)
    with pytest.raises((error, mirrorc.PassError)):
        compiled(fail if where == "passes" else lambda: None)
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count(SHOWS_CURSOR) == 1
    assert not progress_threads()


@pytest.mark.slow
def test_a_terminal_that_cannot_be_written_stops_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    is_tried = threading.Event()

    def fail(text: str) -> int:
        is_tried.set()
        raise OSError("no space left on device")

    monkeypatch.setattr(terminal, "write", fail)
    assert compiled(lambda: until(is_tried.is_set)).program is not None
