"""Workers choose bucket sizes together, by what each has predicted."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_programs import Weight, handmade

from mirrorc import World
from mirrorc.analysis.cost.link_speed import LinkSpeed
from mirrorc.compilation.choices import predicted_bucket_sizes, size_predictions
from mirrorc.compilation.choices.predicted_bucket_sizes import NUM_MEASURED_CALLS, PlannedSizes
from mirrorc.compilation.choices.size_predictions import LADDER, SizeFigures, chosen_sizes
from mirrorc.ir.program import Program
from mirrorc.passes import PlanBuckets, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.runtime.tuning.bucket_sizes import BucketSizes

RUNNING, SMALL = BucketSizes(25, 1), BucketSizes(4, 1)


def figures(running: float, small: float, **more: Any) -> SizeFigures:
    return SizeFigures((), {str(RUNNING): running, str(SMALL): small}, str(RUNNING), "100 MB/s", **more)


def test_the_slowest_worker_decides() -> None:
    sizes, remark = chosen_sizes([figures(20.0, 10.0), figures(30.0, 28.0)], RUNNING)
    assert sizes == SMALL
    assert remark == (
        "bucket sizes by prediction: bucket_cap_mb=4, first_bucket_mb=1 (give these to pin them); predicted ms a step of the "
        "slowest worker, by bucket_cap_mb/first_bucket_mb: 25/1 30, 4/1 28; from the first steps, with bucket_cap_mb=25, "
        "first_bucket_mb=1, and a link of 100 MB/s"
    )
    assert chosen_sizes([figures(20.0, 10.0), figures(30.0, 31.0)], RUNNING)[0] == RUNNING


def test_what_runs_is_kept_unless_something_is_gained() -> None:
    assert chosen_sizes([figures(10.0, 9.95)], RUNNING)[0] == RUNNING
    assert chosen_sizes([figures(10.0, 9.85)], RUNNING)[0] == SMALL


def test_workers_without_figures_do_not_count() -> None:
    assert chosen_sizes([SizeFigures(), figures(20.0, 10.0)], RUNNING)[0] == SMALL
    sizes, remark = chosen_sizes([SizeFigures(), SizeFigures()], RUNNING)
    assert sizes == RUNNING and "of no other was it known what a step takes" in remark


def test_what_the_chief_has_kept_counts_alone() -> None:
    assert chosen_sizes([SizeFigures((10, 1)), figures(1.0, 2.0)], RUNNING) == (BucketSizes(10, 1), "")
    assert chosen_sizes([figures(1.0, 2.0), SizeFigures((10, 1))], RUNNING)[0] == RUNNING


@dataclass
class Board:
    """What workers have told each other, as all have told it at once."""

    others: dict[str, Any] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


class FakeTeam:
    """Seen from one worker: the other tells what the board has."""

    def __init__(self, rank: int, board: Board, speed: float = 1e-8) -> None:
        self.cluster, self.board = SimpleNamespace(rank=rank), board
        self.link, self.num_calls = LinkSpeed(1e-4, speed), 0
        self.words = self

    def kept_texts(self, about: str, text: str) -> list[str]:
        self.board.asked.append(about)
        texts = [text, json.dumps(self.board.others[about])]
        return texts if self.cluster.rank == 0 else texts[::-1]


WEIGHTS = tuple(Weight(f"layer{number}", (512, 512)) for number in range(3))  # 1 MiB each


def captured() -> Program:
    return handmade(1, WEIGHTS).evolve(workers=World(2).worker(0))


def options_of() -> Any:
    pipeline = default_pipeline(over_workers=True)
    plan = next(one for one in pipeline if isinstance(one, PlanBuckets))
    workers = World(2).worker(0)
    backend = SimpleNamespace(name="eager")
    return SimpleNamespace(pipeline=pipeline, to_measure=plan, program_workers=workers, backend=backend)


class Compiled:
    """In place of an executor that has recorded steps."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.recorder = SimpleNamespace(steps=lambda: ("a step",))


def compiled(chooser: PlannedSizes) -> Any:
    program, pipeline = chooser.put_into(captured())
    executor = Compiled(run_passes(program, pipeline))
    chooser.note(executor)  # type: ignore[arg-type]
    return executor


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[BucketSizes, float]:
    """What this worker predicts."""
    monkeypatch.setenv("MIRRORC_CACHE_DIR", str(tmp_path))
    times = dict.fromkeys({RUNNING, *LADDER}, 10.0) | {SMALL: 5.0}
    monkeypatch.setattr(predicted_bucket_sizes, "costs_of_steps", lambda *_: None)
    monkeypatch.setattr(predicted_bucket_sizes, "predicted_milliseconds", lambda *_: times)
    return times


def train(chooser: PlannedSizes, team: FakeTeam, executor: Any = None, calls: int = 1) -> Any:
    """Makes training calls; gives what was compiled last."""
    for _ in range(calls):
        team.num_calls += 1
        with chooser.asked():
            if executor is None or not chooser.keeps(executor):
                executor = compiled(chooser)
    return executor


def told(executor: Any) -> str:
    return next(one.text for one in executor.program.remarks if one.text.startswith("bucket sizes"))


NOTHING = {"known": [], "milliseconds": {}, "measured_with": "", "link": ""}


@pytest.mark.usefixtures("predicted")
def test_sizes_are_chosen_once_and_kept_for_the_next_run() -> None:
    board = Board({"earlier bucket sizes": [], "bucket sizes": NOTHING})
    chooser, team = PlannedSizes(options_of(), 1), FakeTeam(0, board)
    chooser.team = team  # type: ignore[assignment]
    first = train(chooser, team, calls=NUM_MEASURED_CALLS)
    assert "bucket_cap_mb=25, first_bucket_mb=1 to begin with" in told(first) and len(first.program.buckets) == 2
    second = train(chooser, team, first, calls=5)
    assert second is not first and len(second.program.buckets) == 2
    assert told(second).startswith("bucket sizes by prediction: bucket_cap_mb=4, first_bucket_mb=1 (give these")
    assert board.asked == ["earlier bucket sizes", "bucket sizes"]

    later, again = PlannedSizes(options_of(), 1), FakeTeam(0, board)
    later.team = again  # type: ignore[assignment]
    third = train(later, again, calls=NUM_MEASURED_CALLS + 3)
    assert told(third).startswith("bucket sizes as an earlier run has chosen them: bucket_cap_mb=4, first_bucket_mb=1")

    slower, other = PlannedSizes(options_of(), 1), FakeTeam(0, board, speed=3e-8)
    slower.team = other  # type: ignore[assignment]
    assert "to begin with" in told(train(slower, other))  # another link


@pytest.mark.usefixtures("predicted")
def test_a_worker_takes_what_the_chief_has_kept() -> None:
    board = Board({"earlier bucket sizes": [10, 1], "bucket sizes": {**NOTHING, "known": [10, 1]}})
    chooser, team = PlannedSizes(options_of(), 1), FakeTeam(1, board)
    chooser.team = team  # type: ignore[assignment]
    before = compiled(chooser)  # as `Step.prepare` does, where nobody is asked
    assert "to begin with" in told(before)
    after = train(chooser, team, before, calls=NUM_MEASURED_CALLS + 3)
    assert after is not before and "has chosen them: bucket_cap_mb=10, first_bucket_mb=1" in told(after)


def test_a_program_that_stays_says_what_was_chosen(predicted: dict[BucketSizes, float]) -> None:
    predicted[SMALL] = 10.0
    board = Board({"earlier bucket sizes": [], "bucket sizes": NOTHING})
    chooser, team = PlannedSizes(options_of(), 1), FakeTeam(0, board)
    chooser.team = team  # type: ignore[assignment]
    first = train(chooser, team, calls=NUM_MEASURED_CALLS)
    assert train(chooser, team, first) is first
    assert told(first).startswith("bucket sizes by prediction: bucket_cap_mb=25, first_bucket_mb=1 (give these")


def test_plans_are_predicted_without_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRRORC_CACHE_DIR", str(tmp_path))
    options = options_of()
    asked: list[Program] = []

    class Costs:
        def durations(self, program: Program) -> Any:
            asked.append(program)
            return SimpleNamespace(start_seconds=lambda _: 0.0, seconds_of=lambda *_: 0.0, flight_seconds=lambda _: 1.0)

    sizes = {BucketSizes(0.5, 0.5), BucketSizes(1, 1), BucketSizes(25, 1), BucketSizes(25, 25)}
    found = size_predictions.predicted_milliseconds(
        captured(),
        options.pipeline,
        options.to_measure,
        sizes,
        Costs(),  # type: ignore[arg-type]
    )
    assert list(found.values()) == [3000.0, 3000.0, 2000.0, 1000.0]  # a second for each bucket
    assert [len(program.buckets) for program in asked] == [3, 2, 1]  # plans that are equal are one
