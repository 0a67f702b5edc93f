"""Strikes one of several workers at a random moment, and looks at what becomes of all of them (Linux).

python benchmarks/faults.py                                 # kills, stops and raises, 30 times each
python benchmarks/faults.py --kinds stop --times 3 --seed 5
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from struck_workers import NUM_STEPS, PLACES, TEXT, Run, told_by, work

from mirrorc.checkpoints.checkpoint import read

KINDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "raise": signal.SIGUSR1}
CLOSED_SECONDS = 5.0  # within which all end when a connection is closed; after the time to wait, if one hangs
_MOST_SECONDS = 300.0  # that workers may take at all
_NAMED = re.compile(r"^mirrorc\.errors\.CommunicationError: .*?worker (\d+) \(", re.MULTILINE | re.DOTALL)
# An error about a lost store begins with the rank of the worker that says it.
_NAMED_BY_STORE = re.compile(r"the process that opened the store \(worker (\d+), or")


class ForkedError(Exception):
    """Ends, in a child, all that its parent has begun: it is a worker, and ends as any process of Python does."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank = run, rank


@dataclass(frozen=True)
class Strike:
    """What happens to which worker, and when.

    Attributes:
        kind: one of `KINDS`.
        rank: of the worker.
        call: of its step, that it has begun before, from 1.
        moment: seconds after that.
        place: where it raises.
    """

    kind: str
    rank: int
    call: int
    moment: float
    place: str = ""

    def __str__(self) -> str:
        what = f"{self.kind} ({self.place})" if self.place else self.kind
        return f"{what}: worker {self.rank}, {self.moment:.2f} s after call {self.call} has begun"


@dataclass
class Workers:
    """The processes of a run.

    Attributes:
        run: what they do.
        pids: by rank.
        codes: the exit status of those that have ended, by rank; that of one that a signal has ended is negative.
        ended_at: when that was seen, by ``time.monotonic()``.
    """

    run: Run
    pids: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    ended_at: dict[int, float] = field(default_factory=dict)

    def start(self) -> None:
        """Forks them, so that what takes long, the import of torch, was done once."""
        self.run.folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.run.num_workers):
            told_by(self.run, rank).write_text("")
            pid = os.fork()
            if not pid:
                os.setsid()
                output = os.open(self.output(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                for number in (1, 2):
                    os.dup2(output, number)
                raise ForkedError(self.run, rank)
            self.pids.append(pid)

    def output(self, rank: int) -> Path:
        """The file with what a worker prints."""
        return self.run.folder / f"{self.run.name}-output-{rank}"

    def calls(self, rank: int) -> str:
        """A letter for each call that it has begun, and another one for each that has ended."""
        return told_by(self.run, rank).read_text()

    def wait(self, is_enough: Callable[[], bool], seconds: float) -> None:
        """Returns when it is enough, or the time is over."""
        until = time.monotonic() + seconds
        while not is_enough() and time.monotonic() < until:
            for rank, pid in enumerate(self.pids):
                if rank not in self.codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    self.codes[rank], self.ended_at[rank] = os.waitstatus_to_exitcode(found[1]), time.monotonic()
            time.sleep(0.005)

    def have_ended(self, ranks: Sequence[int]) -> bool:
        """Whether these have."""
        return all(rank in self.codes for rank in ranks)

    def end(self) -> list[int]:
        """Ends what still runs, the children of workers as well; gives the ranks of those of which anything was left."""
        left = []
        for rank, pid in enumerate(self.pids):
            try:
                os.killpg(pid, signal.SIGKILL)
                left.append(rank)
            except ProcessLookupError:
                pass
        self.wait(lambda: self.have_ended(range(len(self.pids))), _MOST_SECONDS)
        return left


class Trials:
    """Trials of strikes, all in folders of one folder.

    Args:
        folder: theirs.
        num_workers: how many workers train.
        timeout_seconds: that a worker waits for another one.
        room_seconds: that all may take longer, on a machine that does other things, too.

    Attributes:
        window: how long an undisturbed run takes, from the first call on, in seconds.
    """

    def __init__(self, folder: Path, num_workers: int, timeout_seconds: float, room_seconds: float) -> None:
        self._folder, self._num_workers, self._room = folder, num_workers, room_seconds
        self._timeout, self._number = timeout_seconds, 0
        whole = self._workers("undisturbed")
        whole.start()
        whole.wait(lambda: "b" in whole.calls(0), _MOST_SECONDS)
        began = time.monotonic()
        whole.wait(lambda: whole.have_ended(range(num_workers)), _MOST_SECONDS)
        self.window = time.monotonic() - began
        if problems := list(self._problems_of_undisturbed(whole)):
            raise RuntimeError("; ".join(problems))
        self._expected = self._state(whole)

    def _workers(self, folder: str, name: str = "first", place: str = "") -> Workers:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
        return Workers(Run(self._folder / folder, self._num_workers, port, self._timeout, place, name))

    def strike(self, strike: Strike) -> tuple[float | None, list[str]]:
        """Makes one trial; gives the seconds until the last survivor had ended, and what was not as it should be.

        No seconds if the strike came too late, when the others had made all steps.
        """
        self._number += 1
        folder = f"{self._number}-{strike.kind}"
        struck = self._workers(folder, place=strike.place)
        everyone = range(self._num_workers)
        survivors = [rank for rank in everyone if rank != strike.rank]
        struck.start()
        has_come = lambda: struck.calls(strike.rank).count("b") >= strike.call  # noqa: E731
        struck.wait(lambda: has_come() or bool(struck.codes), _MOST_SECONDS)
        struck.wait(lambda: bool(struck.codes), strike.moment)
        have_met = all("e" in struck.calls(rank) for rank in everyone)
        at = time.monotonic()
        if strike.rank not in struck.codes:
            os.kill(struck.pids[strike.rank], KINDS[strike.kind])
        hangs = strike.kind == "stop" or not have_met
        bound = (self._timeout if hangs else 0.0) + CLOSED_SECONDS
        struck.wait(lambda: struck.have_ended(survivors), bound + self._room + 20.0)
        failed = [rank for rank in survivors if struck.codes.get(rank) != 0]  # others had made all steps
        seconds = max([struck.ended_at.get(rank, time.monotonic()) - at for rank in failed], default=None)
        problems = list(self._problems(struck, strike, survivors))
        if seconds is not None and seconds > bound + self._room:
            problems.append(f"the last survivor ended after {seconds:.1f} s, and not within {bound:.1f} s")
        if strike.kind == "stop" and strike.rank not in struck.codes:
            os.kill(struck.pids[strike.rank], signal.SIGCONT)
        if strike.kind != "kill":
            struck.wait(lambda: struck.have_ended(everyone), 3 * bound + self._room)
            if struck.codes.get(strike.rank, 0) == 0 and survivors[0] in struck.codes and any(struck.codes.values()):
                problems.append(f"the worker that was struck ended with {struck.codes.get(strike.rank)}")
        struck.wait(lambda: struck.have_ended(everyone), 5.0)
        if left := struck.end():
            problems.append(f"of workers {left} something was left")
        again = self._workers(folder, "again")
        again.start()
        again.wait(lambda: again.have_ended(everyone), _MOST_SECONDS)
        problems += self._problems_of_undisturbed(again) or self._differences(again)
        again.end()
        if not problems:
            shutil.rmtree(struck.run.folder)
        return seconds, [*problems, *([f"see {struck.run.folder}"] if problems else [])]

    def _problems(self, struck: Workers, strike: Strike, survivors: Sequence[int]) -> Iterator[str]:
        """What is wrong with the workers that were not struck."""
        for rank in survivors:
            code, said = struck.codes.get(rank), struck.output(rank).read_text()
            if code == 0 and struck.calls(rank).count("e") == NUM_STEPS:
                continue  # all was done when the other one was struck
            if code != 1:
                yield f"worker {rank} ended with {code}"
            named = [*_NAMED.findall(said), *_NAMED_BY_STORE.findall(said)]
            if not named or int(named[-1]) != strike.rank:
                yield f"worker {rank} names {named[-1:] or 'nobody'}: {said.strip().splitlines()[-1:]}"
            if strike.place and not re.search(rf"{TEXT}: {strike.place}|KeyboardInterrupt", said):
                yield f"worker {rank} does not say what was raised: {said.strip().splitlines()[-1:]}"

    def _problems_of_undisturbed(self, workers: Workers) -> list[str]:
        problems = []
        for rank in range(self._num_workers):
            if workers.codes.get(rank) != 0:
                last = workers.output(rank).read_text().strip().splitlines()[-1:]
                problems.append(
                    f"worker {rank} of a run that nobody struck ended with {workers.codes.get(rank)}: {last}"
                )
        return problems

    def _differences(self, workers: Workers) -> list[str]:
        found = self._state(workers)
        if found.keys() != self._expected.keys():
            return ["the last checkpoint has other parts than that of the undisturbed run"]
        other = [name for name, value in self._expected.items() if not _is_same(value, found[name])]
        return [f"the last checkpoint differs from that of the undisturbed run in {other[:3]}"] if other else []

    def _state(self, workers: Workers) -> dict[str, Any]:
        """The last checkpoint, with each worker's part, flat."""
        last = workers.run.folder / "checkpoints" / "last"
        own = {f"worker-{rank}": read(last / f"worker-{rank}") for rank in range(self._num_workers)}
        return dict(_flat({"all": read(last), **own}))


def _flat(state: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _flat(value, f"{name}.{key}")
    else:
        yield name, state


def _is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def drawn(kind: str, number: int, seed: int, num_workers: int, window: float) -> Strike:
    """A strike, by its number."""
    draws = random.Random(f"{seed} {kind} {number}")
    rank, call = draws.randrange(num_workers), draws.randint(1, NUM_STEPS - 2)
    moment = draws.uniform(0, window / NUM_STEPS)  # as long as a step takes, with all that is beside it
    places = [place for place in PLACES if place != "save" or rank == 0]
    return Strike(kind, rank, call, moment, draws.choice(places) if kind == "raise" else "")


def main() -> int:
    """Makes all trials, and prints a table; returns 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--times", type=int, default=30, help="of each kind, besides those that come too late")
    parser.add_argument("--skip", type=int, default=0, help="that many of each kind")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=6.0, help="seconds that a worker waits for another one")
    parser.add_argument("--room", type=float, default=0.0, help="seconds beyond the bounds, on a machine that is busy")
    parser.add_argument(
        "--folder", type=Path, help="where to make a folder for what workers say; kept if something is wrong"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="mirrorc-faults-", dir=options.folder))
    trials = Trials(folder, options.workers, options.timeout, options.room)
    print(f"an undisturbed run takes {trials.window:.1f} s from its first call on; {folder}", flush=True)
    rows, num_wrong = [], 0
    for kind in options.kinds:
        worst, wrong, late, number = 0.0, 0, 0, options.skip
        while (
            number - late < options.skip + options.times and late < options.times
        ):  # who is struck too late does not count
            strike = drawn(kind, number, options.seed, options.workers, trials.window)
            number += 1
            seconds, problems = trials.strike(strike)
            worst, wrong, late = max(worst, seconds or 0.0), wrong + bool(problems), late + (seconds is None)
            ended = (
                "too late: all others had made all steps" if seconds is None else f"all had ended {seconds:.1f} s later"
            )
            print(f"{strike}: {ended}; {'; '.join(problems) or 'as it should be'}", flush=True)
        num_wrong += wrong
        rows.append(f"| {kind} | {number - late - options.skip} | {late} | {wrong} | {worst:.1f} |")
    print(
        "| kind | times | too late, besides | wrong | seconds until the last survivor had ended, at most |\n|---|---|---|---|---|"
    )
    print("\n".join(rows))
    if not num_wrong:
        shutil.rmtree(folder)
    return int(bool(num_wrong))


if __name__ == "__main__":
    forked = None
    try:
        code = main()
    except ForkedError as error:
        forked = error
    if forked is None:
        sys.exit(code)
    work(forked.run, forked.rank)
