"""Predicts what steps over several workers take with other bucket sizes, and chooses sizes by what all workers have predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mirrorc.analysis.cost.simulation import simulate
from mirrorc.analysis.cost.step_costs import StepCosts, UnknownCostError
from mirrorc.ir.program import Program
from mirrorc.passes import PlanBuckets
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Pass
from mirrorc.runtime.tuning.bucket_sizes import BucketSizes

LADDER = tuple(BucketSizes(*sizes) for sizes in [(1, 1), (4, 1), (10, 1), (25, 1), (25, 25), (64, 1), (1024, 1024)])
"""The sizes to choose from, in MiB, besides those with which a step begins."""
NOISE = 0.01
"""The smallest relative gain for which another plan takes the place of the one that runs, which must be compiled for it."""


@dataclass(frozen=True)
class SizeFigures:
    """What a worker tells the others before sizes are chosen, as plain data.

    Attributes:
        known: the sizes that it has kept from an earlier run, ``[bucket_cap_mb, first_bucket_mb]``; empty if it has none.
        milliseconds: what steps are predicted to take, by the text of `BucketSizes`; empty if it has recorded none.
        measured_with: the text of the sizes of the recorded steps.
        link: the link as it has measured it, in words.
    """

    known: Sequence[float] = ()
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    measured_with: str = ""
    link: str = ""


def predicted_milliseconds(
    captured: Program, pipeline: Sequence[Pass], plan: PlanBuckets, sizes: set[BucketSizes], costs: StepCosts
) -> dict[BucketSizes, float]:
    """What the step of a captured program would take with each of these sizes, in milliseconds, in the order of the sizes.

    Nothing is compiled. It is empty if it is not known what an operation of the program takes.

    Args:
        captured: a CAPTURED program of a training step over several workers.
        pipeline: the passes, with `plan` among them.
        plan: the pass whose sizes are replaced.
        sizes: to predict for.
        costs: learned from steps of this program with some sizes.
    """
    place = list(pipeline).index(plan)
    before = run_passes(captured, pipeline[:place])
    of_plan: dict[Any, float] = {}
    found: dict[BucketSizes, float] = {}
    for one in sorted(sizes, key=lambda own: (own.bucket_cap_mb, own.first_bucket_mb)):
        first, *others = sized(pipeline, plan, one)[place:]
        planned = run_passes(before, [first])
        if planned.buckets not in of_plan:
            program = run_passes(planned, others)
            try:
                of_plan[planned.buckets] = float(f"{1e3 * simulate(program, costs.durations(program)).seconds:.4g}")
            except UnknownCostError:
                return {}
        found[one] = of_plan[planned.buckets]
    return found


def chosen_sizes(everyone: Sequence[SizeFigures], running: BucketSizes) -> tuple[BucketSizes, str]:
    """The sizes that all workers take, and a remark on why; empty if the former one still says it. Alike on all workers.

    Args:
        everyone: what each worker has told, by rank.
        running: the sizes with which their steps have run.
    """
    if everyone[0].known:
        return BucketSizes(*everyone[0].known), ""
    told = [own for own in everyone if own.milliseconds]
    if not told:
        return (
            running,
            f"bucket sizes: {running}, with which the step has begun; of no other was it known what a step takes",
        )
    names = [name for name in told[0].milliseconds if all(name in own.milliseconds for own in told)]
    worst = {name: max(own.milliseconds[name] for own in told) for name in names}
    least = min(worst, key=worst.__getitem__)
    is_as_good = str(running) in worst and worst[str(running)] <= worst[least] * (1 + NOISE)
    sizes = running if is_as_good else next(one for one in (running, *LADDER) if str(one) == least)
    times = ", ".join(f"{_short(name)} {ms:g}" for name, ms in worst.items())
    return sizes, (
        f"bucket sizes by prediction: {sizes} (give these to pin them); predicted ms a step of the slowest worker, by "
        f"bucket_cap_mb/first_bucket_mb: {times}; from the first steps, with {told[0].measured_with}, and a link of "
        f"{told[0].link}"
    )


def _short(name: str) -> str:
    return "/".join(part.partition("=")[2] for part in name.split(", "))


def sized(pipeline: Sequence[Pass], plan: Pass, sizes: BucketSizes) -> list[Pass]:
    """The pipeline with these sizes in its plan."""
    assert isinstance(plan, PlanBuckets)
    sized = dataclasses.replace(plan, **asdict(sizes))
    return [sized if one is plan else one for one in pipeline]
