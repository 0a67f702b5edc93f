"""Looks at mirrorc on one GPU: is it right, how fast is it, what drives several devices, does the example train.

    python benchmarks/gpu_acceptance.py --out FOLDER                    # all parts, each in less than ten minutes
    python benchmarks/gpu_acceptance.py --out FOLDER --only correctness --at-once 6
    python benchmarks/gpu_acceptance.py --out FOLDER --device cpu       # a rehearsal with tiny sizes, on a machine without a GPU

Each probe is a process of its own with a bound on its time: a crash and a timeout are results. Prints a table for each part, and
writes ``PART.json`` and a log of each probe into the folder. Needs no network. Where mirrorc is installed from a wheel, run
it with ``python -P``, so that the checkout's own folders stay off the path. Ends with 1 if a probe has failed, and with 2 if
there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # also under python -P

import torch  # noqa: E402
from gpu_probes.goals import goals_of  # noqa: E402
from gpu_probes.probe import PARTS, PROBES, Probe  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

_FEWEST_SECONDS = 15.0  # a probe is not begun with less than that


@dataclass(frozen=True)
class Limits:
    """How much of a part runs.

    Attributes:
        part_seconds: no probe of a part runs longer.
        at_once: how many probes that measure nothing run beside each other.
    """

    part_seconds: float
    at_once: int = 1


@dataclass(frozen=True)
class Result:
    """What came of a probe.

    Attributes:
        status: "ok"; "failed": it found something wrong; "crashed"; "timed out"; "skipped": it cannot run here; "not run": the
            part's time was over.
        says: what went wrong, or why it did not run.
        figures: what it measured, by name.
        seconds: what it took.
    """

    name: str
    status: str
    says: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether nothing is known to be wrong."""
        return self.status in ("ok", "skipped")


def run_bounded(command: Sequence[str], seconds: float, environment: Mapping[str, str], log: Path) -> int | None:
    """Runs a command with a bound on its time, after which all processes of its session are killed.

    Returns:
        Its exit status, negative for a signal; None if it was killed because its time was over.
    """
    with log.open("w", encoding="utf-8") as written:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def result_of(name: str, status: int | None, found: Path, log: Path, seconds: float) -> Result:
    """What came of a probe's process, from its exit status, the file that it has written, if any, and its log."""
    if status is None:
        return Result(name, "timed out", f"ended after {seconds:.0f} s; {last_line(log)}", {}, seconds)
    if status == 0 and found.exists():
        return Result(name=name, seconds=seconds, **json.loads(found.read_text(encoding="utf-8")))
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return Result(name, "crashed", f"{how}; {last_line(log)}", {}, seconds)


def last_line(log: Path) -> str:
    """The last line of a log that says anything."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def plain(name: str) -> str:
    """A name without what compilers and shells do not like in paths."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in name)


def file_name(probe: Probe) -> str:
    """What a probe's files are called."""
    return plain(f"{probe.part}-{probe.name}")


def run_probe(probe: Probe, device: str, out: Path, seconds: float, caches: Path) -> Result:
    """Runs a probe in a process of its own."""
    log, found = out / f"{file_name(probe)}.log", caches / f"{file_name(probe)}.json"
    cache = caches / (f"kernels-{plain(probe.leaves)}" if probe.leaves else file_name(probe))
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1", **probe.environment}
    command = [sys.executable, "-P", str(HERE / "gpu_probes"), f"{probe.part}/{probe.name}", "--device", device]
    begun = time.perf_counter()
    status = run_bounded(
        [*command, "--out", str(out), "--result", str(found)], min(seconds, probe.seconds), environment, log
    )
    return result_of(probe.name, status, found, log, time.perf_counter() - begun)


def _as_they_come(run: Callable[[Probe], Result], probes: Sequence[Probe], at_once: int) -> Iterator[Result]:
    if at_once == 1:
        yield from map(run, probes)
        return
    threads = ThreadPoolExecutor(at_once)
    try:
        for done in as_completed([threads.submit(run, probe) for probe in probes]):
            yield done.result()
    finally:
        threads.shutdown(cancel_futures=True)


def run_part(
    part: str, probes: Sequence[Probe], device: str, out: Path, console: Console, limits: Limits
) -> list[Result]:
    """Runs the probes of a part in order, those that measure one after the other; writes what is known after each."""
    deadline = time.perf_counter() + limits.part_seconds
    results: dict[str, Result] = {}

    def result_of_one(probe: Probe) -> Result:
        left = deadline - time.perf_counter()
        if left < _FEWEST_SECONDS:
            return Result(probe.name, "not run", f"the part's {limits.part_seconds:.0f} s are over")
        return run_probe(probe, device, out, left, Path(caches))

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as caches:
        is_measured = part != "correctness"
        for last in _as_they_come(result_of_one, probes, 1 if is_measured else limits.at_once):
            console.print(f"{part}: {last.name}: {last.status} ({last.seconds:.0f} s)", markup=False, highlight=False)
            results[last.name] = last
            write(part, list(results.values()), device, out)
    return [results[probe.name] for probe in probes]


def write(part: str, results: Sequence[Result], device: str, out: Path) -> None:
    """Writes the results of a part as JSON."""
    machine = {"torch": torch.__version__, "python": sys.version.split()[0], "device": device}
    if device == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name(0), "cuda": str(torch.version.cuda)}
    goals = [asdict(goal) for goal in goals_of({one.name: one.figures for one in results})]
    told = {"machine": machine, "probes": [asdict(one) for one in results], "goals": goals}
    (out / f"{part}.json").write_text(json.dumps(told, indent=1), encoding="utf-8")


def text_of(value: Any) -> str:
    """A figure as it stands in a table."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def table_of(part: str, results: Sequence[Result]) -> Table:
    """The results of a part: a row for each probe, a column for each figure that any of them has."""
    columns = list(dict.fromkeys(name for one in results for name in one.figures if name != "says"))
    table = Table(title=part, title_justify="left")
    for name in ("probe", "result", *columns, "s"):
        table.add_column(name, justify="left" if name in ("probe", "result") else "right", overflow="fold")
    table.add_column("remark", overflow="fold")
    for one in results:
        figures = [text_of(one.figures.get(name)) for name in columns]
        table.add_row(
            one.name, one.status, *figures, f"{one.seconds:.0f}", one.says or str(one.figures.get("says", ""))
        )
    return table


def goals_table(results: Sequence[Result]) -> Table | None:
    """The goals about which the results say something."""
    goals = goals_of({one.name: one.figures for one in results})
    if not goals:
        return None
    table = Table("goal", "found", "bound", "result", title="goals", title_justify="left")
    for goal in goals:
        bound = "" if goal.most is None else text_of(goal.most)
        table.add_row(goal.what, text_of(goal.found), bound, goal.verdict)
    return table


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results, logs and a trace")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--probes", nargs="+", default=[], metavar="NAME", help="of these parts' probes, only these")
    parser.add_argument("--seconds", type=float, default=570.0, help="no probe of a part runs longer")
    parser.add_argument("--at-once", type=int, default=1, help="so many of correctness run beside each other")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; gives the exit status."""
    options, console = options_of(arguments), Console(width=None if sys.stdout.isatty() else 200)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            f"torch {torch.__version__} sees no GPU here: run this on a machine with one, or rehearse it with --device cpu.",
            file=sys.stderr,
        )
        return 2
    import gpu_probes.catalogue  # noqa: F401 - adds all probes

    options.out.mkdir(parents=True, exist_ok=True)
    out, is_good = options.out.resolve(), True
    for part in options.only:
        probes = [probe for probe in PROBES.values() if probe.part == part]
        probes = [probe for probe in probes if not options.probes or probe.name in options.probes]
        limits = Limits(options.seconds, options.at_once)
        results = run_part(part, probes, options.device, out, console, limits)
        console.print(table_of(part, results))
        goals = goals_table(results)
        if goals is not None:
            console.print(goals)
        is_good = is_good and all(one.is_good for one in results)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
