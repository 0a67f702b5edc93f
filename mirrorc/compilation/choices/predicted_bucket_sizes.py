"""Chooses the bucket sizes of steps over several workers, once, by what steps of several plans are predicted to take."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from mirrorc.analysis.cost.link_speed import LinkSpeed
from mirrorc.compilation.choices.size_predictions import (
    LADDER,
    SizeFigures,
    chosen_sizes,
    predicted_milliseconds,
    sized,
)
from mirrorc.ir.program import Accumulation, Program
from mirrorc.options.step_options import StepOptions
from mirrorc.passes import PlanBuckets
from mirrorc.pipeline.protocol import Pass
from mirrorc.runtime.devices.machine import device_model, measured_machine, num_cores
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.profiling.calibration import costs_of_steps
from mirrorc.runtime.tuning.bucket_sizes import BucketSizes
from mirrorc.runtime.tuning.cache import Entry, MeasurementCache
from mirrorc.runtime.workers.team.team import Team

NUM_MEASURED_CALLS = 8
"""How many training calls are made before sizes are chosen; the first one of a program does not count."""
_SAME_LINK = 2.0  # a link whose bytes cost more or less by this factor is another one
_FORMAT = 1  # of the stored entries; also increases when predictions change


class PlannedSizes:
    """The bucket sizes of a step over several workers, if its options ask for a choice.

    A step begins with given sizes. When all workers have made some steps, each predicts what its steps would take with other
    sizes, all tell each other, and all choose the sizes with which the slowest worker's step is shortest. From then on they
    stay. The chief keeps them for later runs, which have them from their first step on.

    Every worker is asked in the same calls, whatever it compiles in them, so that nobody waits for one who is not asked.

    Args:
        options: of the step.
        num_threads: of each device.

    Attributes:
        team: the workers that train together.
    """

    def __init__(self, options: StepOptions, num_threads: int) -> None:
        self._options, self._num_threads = options, num_threads
        self.team: Team | None = None
        plan = options.to_measure
        assert plan is None or isinstance(plan, PlanBuckets)
        self._plan = plan if options.program_workers.are_several else None
        self._sizes = BucketSizes(plan.bucket_cap_mb, plan.first_bucket_mb) if plan is not None else BucketSizes(25, 1)
        self._remark = _begins_with(self._sizes)
        self._cache: MeasurementCache | None = None  # for the first captured program
        self._is_in_call = self._knows_earlier = self._is_held = False
        self._own_earlier: Sequence[float] | None = None  # what this worker has told of an earlier run
        self._earlier: BucketSizes | None = None  # what the chief has told of it
        self._loaded: BucketSizes | None = None  # what this worker's state has of an earlier run
        self._told: SizeFigures | None = None
        self._captured: Program | None = None  # the last one
        self._planned: weakref.WeakKeyDictionary[Executor, tuple[BucketSizes, Program | None]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def kept(self) -> BucketSizes | None:
        """What workers have chosen, or what was loaded; None if nothing was, or nothing is to be chosen."""
        return self._sizes if self._plan is not None and self._is_held else self._earlier or self._loaded

    @property
    def is_open(self) -> bool:
        """Whether `load` still counts: until the first training call."""
        return not (self._knows_earlier or self._is_held)

    def load(self, sizes: BucketSizes) -> None:
        """Takes what was chosen in an earlier run, if anything is to be chosen; what the chief has loaded counts for all."""
        assert self.is_open, "programs of one step have one plan"
        if self._plan is not None:
            self._loaded = sizes

    @contextmanager
    def asked(self) -> Iterator[None]:
        """A block in which all workers are in a training call. At the beginning of the one after the measured ones they choose.

        Raises:
            LostConnectionError: a worker has failed, or tells nothing in time.
        """
        self._is_in_call = True
        try:
            is_open = self._plan is not None and not self._is_held
            if is_open and self.team is not None and self.team.num_calls > NUM_MEASURED_CALLS:
                self._choose(self.team)
            yield
        finally:
            self._is_in_call = False

    def put_into(self, program: Program) -> tuple[Program, Sequence[Pass]]:
        """The pipeline with the present sizes, and a captured program of a training step with a remark on them."""
        plan, options = self._plan, self._options
        if plan is None:
            return program, options.pipeline
        if self._cache is None:
            self._cache = MeasurementCache("plans", _key(program, options, self._num_threads))
        self._learn_of_earlier()
        self._captured = program
        return program.with_remarks(self._remark), sized(options.pipeline, plan, self._sizes)

    def note(self, executor: Executor) -> None:
        """Notes that the last captured program was compiled, with the present sizes."""
        if self._plan is not None and executor.program.trains:
            self._planned[executor] = self._sizes, None if self._is_held else self._captured
            self._captured = None

    def keeps(self, executor: Executor) -> bool:
        """Whether a program has the sizes that all workers have chosen; it may have been compiled before they did.

        Raises:
            LostConnectionError: as `asked`.
        """
        if self._plan is None or executor not in self._planned:
            return True
        self._learn_of_earlier()
        sizes, captured = self._planned[executor]
        if sizes != self._sizes:
            return False
        if self._is_held and captured is not None:  # it goes on with what it has begun with
            remarks = [
                dataclasses.replace(one, text=self._remark) if one.text == _begins_with(sizes) else one
                for one in executor.program.remarks
            ]
            executor.program = executor.program.evolve(remarks=tuple(remarks))
            self._planned[executor] = sizes, None
        return True

    def _learn_of_earlier(self) -> None:
        """In the first training call, learns from the chief which sizes an earlier run has chosen, and begins with them."""
        team, cache = self.team, self._cache
        if self._knows_earlier or self._is_held or not self._is_in_call or team is None or cache is None:
            return
        if self._own_earlier is None:  # told again, it must be the same
            self._own_earlier = self._known_earlier(team, cache) if team.cluster.rank == 0 else ()
        known = json.loads(team.words.kept_texts("earlier bucket sizes", json.dumps(list(self._own_earlier)))[0])
        self._knows_earlier = True
        if known:
            self._earlier = self._sizes = BucketSizes(*known)
            self._remark = f"bucket sizes as an earlier run has chosen them: {self._sizes} (give these to pin them)"

    def _known_earlier(self, team: Team, cache: MeasurementCache) -> Sequence[float]:
        """The sizes that were loaded, or that an earlier run over a like link has kept; empty if there are none."""
        if self._loaded is not None:
            return tuple(asdict(self._loaded).values())
        kept = cache.read(_is_whole)
        return kept["sizes"] if kept is not None and _is_over(team.link, kept) else ()

    def _choose(self, team: Team) -> None:
        """Chooses together with all workers."""
        if self._told is None:
            known = asdict(self._earlier).values() if self._earlier is not None else ()
            self._told = SizeFigures(tuple(known), *self._predictions(team))
        told = team.words.kept_texts("bucket sizes", json.dumps(asdict(self._told)))
        everyone = [SizeFigures(**json.loads(text)) for text in told]
        running = self._sizes
        self._sizes, remark = chosen_sizes(everyone, running)
        self._remark = remark or self._remark
        self._is_held = True
        if team.cluster.rank == 0 and not everyone[0].known and self._cache is not None and team.link is not None:
            entry = {"sizes": list(asdict(self._sizes).values()), "link": asdict(team.link), "remark": self._remark}
            if any(own.milliseconds for own in everyone):
                self._cache.keep(entry, lambda one: _is_whole(one) and _is_over(team.link, one))

    def _predictions(self, team: Team) -> tuple[dict[str, float], str, str]:
        """What steps are predicted to take by the text of their sizes, that of those that were measured, and the link."""
        if self._earlier is not None or team.link is None:
            return {}, "", ""
        found: list[tuple[int, Executor, BucketSizes, Program]] = []
        for executor, (sizes, captured) in self._planned.items():
            steps = executor.recorder.steps() if executor.recorder is not None else ()
            if captured is not None and captured.accumulation is not Accumulation.ADDS and steps:
                found.append((len(steps), executor, sizes, captured))
        if not found or self._plan is None:
            return {}, "", str(team.link)
        _, executor, sizes, captured = max(found, key=lambda one: one[0])
        assert executor.recorder is not None
        costs = costs_of_steps(executor.program, executor.recorder.steps(), measured_machine(), team.link)
        predicted = predicted_milliseconds(captured, self._options.pipeline, self._plan, {sizes, *LADDER}, costs)
        return {str(one): ms for one, ms in predicted.items()}, str(sizes), str(team.link)


def _begins_with(sizes: BucketSizes) -> str:
    return (
        f"bucket sizes: {sizes} to begin with; after {NUM_MEASURED_CALLS} training calls workers choose those with which steps "
        "are predicted to be shortest"
    )


def _is_whole(result: Any) -> bool:
    cap, first = result["sizes"]
    link = LinkSpeed(**result["link"])
    return cap > 0 and first > 0 and link.seconds_per_byte > 0 and isinstance(result["remark"], str)


def _is_over(link: LinkSpeed | None, kept: Entry) -> bool:
    """Whether sizes were chosen for a link like this one."""
    if link is None:
        return False
    ratio = link.seconds_per_byte / LinkSpeed(**kept["link"]).seconds_per_byte
    return 1 / _SAME_LINK < ratio < _SAME_LINK


def _key(program: Program, options: StepOptions, num_threads: int) -> Entry:
    """What predictions of a captured program follow from, besides the link."""
    shapes = [
        (node.target, tuple(node.meta["val"].shape), str(node.meta["val"].dtype))
        for graph in program.shard_graphs
        for node in graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
    ]
    variables = [(one.name, one.shape, str(one.dtype), str(one.update)) for one in program.variables.values()]
    what = repr((shapes, variables, program.workers.sent_as_factors, [repr(one) for one in options.pipeline]))
    return {
        "format": _FORMAT,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "devices": [device_model(device.torch_device) for device in program.devices],
        "cores": num_cores(),
        "threads_per_device": num_threads,
        "devices_per_worker": list(program.workers.devices_per_worker),
        "backend": options.backend.name,
        "program": hashlib.sha256(what.encode()).hexdigest(),
    }
