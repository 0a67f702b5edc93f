"""The processes of a contender, seen from outside: told to step, timed, and their memory looked at."""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Sequence
from typing import Any

import psutil

MOST_SECONDS = 1200  # that processes may take to answer


class ContenderProcesses:
    """The processes of one contender on one workload, which speak as `serving.serve` does; they sleep between runs.

    Args:
        commands: what starts each of them.

    Raises:
        RuntimeError: a process ended instead of answering; what it said is on standard error.
    """

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._processes = [subprocess.Popen(command, **pipes, env={**os.environ}) for command in commands]
        try:
            self.seconds_to_first_step = float(max(self._answers()))
        except BaseException:
            self.close()
            raise

    def run(self, count: int) -> list[float]:
        """Seconds of each of ``count`` steps; of the slowest process, where there are several."""
        self._ask(count)
        return [max(times) for times in zip(*self._answers(), strict=True)]

    def peak_memory(self, count: int) -> int:
        """The most bytes that the processes have together at any time in ``count`` steps.

        Proportional set size: what several processes map, such as torch's libraries, counts once.
        """
        processes, peak = [psutil.Process(process.pid) for process in self._processes], 0
        self._ask(count)
        outputs = [process.stdout for process in self._processes]
        while len(select.select(outputs, [], [], 0)[0]) < len(outputs):
            peak = max(peak, sum(process.memory_full_info().pss for process in processes))
        self._answers()
        return peak

    def _ask(self, count: int) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{count}\n")
            process.stdin.flush()

    def _answers(self) -> list[Any]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            if not select.select([process.stdout], [], [], MOST_SECONDS)[0]:
                raise RuntimeError(f"{' '.join(map(str, process.args))} did not answer within {MOST_SECONDS} s")  # type: ignore[arg-type]
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{' '.join(map(str, process.args))} ended instead of answering")  # type: ignore[arg-type]
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
