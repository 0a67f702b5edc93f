"""Times the compiler itself: passes, verifier, printing, and the complete text, over a deep synthetic model.

    python benchmarks/passes.py [--nodes 25000 50000 100000] [--devices 2] [--bucket-cap-mb 25] [--profile]

The model is a stack of linear layers with ReLU, forward and backward; its graph is made by hand, as capturing it would take
minutes. "text" prints the lowered program completely, "parsed" reads it back, "checked" verifies that; "all" is without them. The
last column tells what doubling the depth costs.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import time
from typing import Any

from deep_program import deep_program

import mirrorc
from mirrorc.dumps.files import PassReport
from mirrorc.ir.program import Program
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Instrument, Pass
from mirrorc.verifier.verifier import VerifiedGraphs, verify


class Stopwatch(Instrument):
    """Sums up the seconds of passes, verifier and printer."""

    def __init__(self) -> None:
        self.seconds = {"passes": 0.0, "verifier": 0.0, "printing": 0.0}
        self.by_pass: dict[str, list[float]] = {}
        self._checked = VerifiedGraphs()

    def start(self, program: Program) -> None:
        """Verifies the program that the passes begin with."""
        self._timed("verifier", lambda: verify(program, checked=self._checked))

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        """Verifies, and prints as ``dump=`` does: in full what has changed."""
        self.seconds["passes"] += seconds
        checked = self._timed("verifier", lambda: verify(after, before=before, checked=self._checked))
        printed = self._timed("printing", lambda: PassReport(compiler_pass.name, after, before, seconds * 1e3).text())
        self.by_pass[compiler_pass.name] = [seconds, checked, printed]

    def _timed(self, what: str, action: Any) -> float:
        started = time.perf_counter()
        action()
        seconds = time.perf_counter() - started
        self.seconds[what] += seconds
        return seconds


def measure(num_nodes: int, num_devices: int, bucket_cap_mb: float) -> tuple[Stopwatch, list[float]]:
    """Compiles one program; gives the seconds of its complete text, too: printed, parsed, checked."""
    program = deep_program(num_nodes, num_devices)
    watch = Stopwatch()
    lowered = run_passes(program, default_pipeline(buckets=bucket_cap_mb), [watch])
    times = [time.perf_counter()]
    text = lowered.to_text(complete=True)
    times.append(time.perf_counter())
    parsed = mirrorc.parse(text)
    times.append(time.perf_counter())
    verify(parsed)
    times.append(time.perf_counter())
    return watch, [after - before for before, after in itertools.pairwise(times)]


def main() -> None:
    """Measures what the command line names and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[25_000, 50_000, 100_000])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    parser.add_argument("--profile", action="store_true", help="also print where the time goes, by pass and function")
    options = parser.parse_args()
    print(
        "| nodes | passes, s | verifier, s | printing, s | text, s | parsed, s | checked, s | all, s | times the one before |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    last = 0.0
    for num_nodes in options.nodes:
        with cProfile.Profile() as profile:
            if not options.profile:
                profile.disable()
            watch, of_text = measure(num_nodes, options.devices, options.bucket_cap_mb)
        total = sum(watch.seconds.values())
        parts = " | ".join(f"{seconds:.1f}" for seconds in (*watch.seconds.values(), *of_text))
        print(f"| {num_nodes} | {parts} | {total:.1f} | {f'{total / last:.2f}' if last else ''} |", flush=True)
        last = total
        if options.profile:
            for name, (seconds, checked, printed) in watch.by_pass.items():
                print(f"{name:>20}: pass {seconds:.2f} s, verifier {checked:.2f} s, printing {printed:.2f} s")
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
