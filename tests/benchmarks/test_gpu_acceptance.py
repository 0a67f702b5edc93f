"""The script that looks at mirrorc on a GPU tells of crashes and timeouts, and can be rehearsed without one."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_acceptance import Result, goals_table, main, result_of, run_bounded, table_of
from rich.console import Console
from rich.table import Table
from selections import exhaustive, slow


def ran(tmp_path: Path, program: str, seconds: float = 60.0) -> Result:
    log, found = tmp_path / "log", tmp_path / "found.json"
    begun = time.perf_counter()
    status = run_bounded([sys.executable, "-S", "-c", program, str(found)], seconds, {"TOLD": "so"}, log)
    return result_of("one", status, found, log, time.perf_counter() - begun)


def text_of(table: Table | None) -> str:
    assert table is not None
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_what_a_process_has_found_is_told(tmp_path: Path) -> None:
    program = "import json, os, sys; open(sys.argv[1], 'w').write(json.dumps("
    program += "{'status': 'ok', 'says': os.environ['TOLD'], 'figures': {'GPU ms': 2.5}}))"
    result = ran(tmp_path, program)
    assert (result.status, result.says, result.figures, result.is_good) == ("ok", "so", {"GPU ms": 2.5}, True)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            "import os, signal; print('at it', flush=True); os.kill(os.getpid(), signal.SIGSEGV)",
            "signal SIGSEGV; at it",
        ),
        ("import sys; print('CUDA error'); sys.exit(3)", "exit status 3; CUDA error"),
        ("", "exit status 0; it printed nothing"),
    ],
)
def test_a_crash_is_a_result(tmp_path: Path, program: str, says: str) -> None:
    result = ran(tmp_path, program)
    assert (result.status, result.says, result.is_good) == ("crashed", says, False)


@pytest.mark.slow
def test_a_timeout_ends_all_that_a_probe_has_started(tmp_path: Path) -> None:
    program = "import subprocess, sys, time; "
    program += "print(subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)']).pid, flush=True); "
    program += "time.sleep(600)"
    result = ran(tmp_path, program, seconds=3.0)
    assert result.status == "timed out" and not result.is_good
    started = int(result.says.rpartition("; ")[2])
    deadline = time.monotonic() + 60.0
    while is_running(started):
        assert time.monotonic() < deadline, "it goes on"


def is_running(process: int) -> bool:
    """Whether a process does anything yet; one that nobody has asked about since it ended does not."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_tables_have_a_column_for_each_figure_and_goals_are_judged() -> None:
    results = [
        Result("gpt2-8 mirrorc", "ok", "", {"GPU ms": 21.0, "told MiB": 100.0, "peak MiB": 120.0}, 30.0),
        Result("gpt2-8 torch.compile", "ok", "", {"GPU ms": 20.0}, 20.0),
        Result("mlp-8 mirrorc", "timed out", "ended after 150 s; nothing", {}, 150.0),
    ]
    text = text_of(table_of("speed", results))
    assert [text.count(word) for word in ("GPU ms", "told MiB", "timed out", "ended after 150 s; nothing")] == [1] * 4
    goals = text_of(goals_table(results))
    assert [line.split()[-2] for line in goals.splitlines() if "gpt2-8" in line] == ["met", "missed"]
    assert goals_table(results[1:]) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "sees no GPU here" in said and said.count("\n") == 1 and not (tmp_path / "out").exists()


REHEARSED = {
    "correctness": ["behind", "shown-buffers", "pinned", "recapture", "embeddings"],
    "speed": ["mlp-8 without synchronization", "mlp-8 eager", "mlp-8 mirrorc"],
    "processes": ["2 in threads", "2 in processes", "trace"],
    "example": ["train-text-1", "memcheck"],
}
SKIPPED = {"recapture", "mlp-8 without synchronization", "memcheck"}


@pytest.mark.parametrize("part", [*slow(("correctness",)), *exhaustive(("speed",), ("processes",), ("example",))])
def test_a_rehearsal_runs_every_kind_of_probe(tmp_path: Path, part: str) -> None:
    given = ["--device", "cpu", "--only", part, "--at-once", "2", "--probes", *REHEARSED[part]]
    assert main(["--out", str(tmp_path), *given]) == 0
    told = json.loads((tmp_path / f"{part}.json").read_text(encoding="utf-8"))
    assert {probe["name"] for probe in told["probes"]} == set(REHEARSED[part])
    for probe in told["probes"]:
        is_skipped = probe["name"] in SKIPPED
        assert (probe["status"], probe["says"]) == (("skipped", "it needs a GPU") if is_skipped else ("ok", "")), probe
    assert told["machine"]["device"] == "cpu"
    assert sum(probe["seconds"] for probe in told["probes"]) > 0
