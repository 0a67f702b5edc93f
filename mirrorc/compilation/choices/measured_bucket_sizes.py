"""Chooses bucket sizes by measurement, once for all programs of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mirrorc.ir.links import best_link, why_memory_is_not_shared
from mirrorc.ir.program import Program
from mirrorc.options.step_options import StepOptions
from mirrorc.passes import LowerCollectives, PlanBuckets, ShareParameters
from mirrorc.pipeline.protocol import Pass
from mirrorc.runtime.tuning.bucket_sizes import BucketSizes, ChosenSizes, choose_bucket_sizes, setting_of


class MeasuredSizes:
    """Measures for the first program that is compiled, if the options ask for it.

    Args:
        options: the options of the step.
        num_threads: the number of threads of each device.
    """

    def __init__(self, options: StepOptions, num_threads: int) -> None:
        self._options, self._num_threads = options, num_threads
        self._chosen: ChosenSizes | None = None
        self.is_open = True  # until a program has them

    @property
    def kept(self) -> BucketSizes | None:
        """What was measured, or loaded; None if nothing was, or nothing is to be measured."""
        return None if self._chosen is None else self._chosen.sizes

    def load(self, sizes: BucketSizes) -> None:
        """Takes what was measured in an earlier run, if anything is to be measured; before a program has any sizes."""
        assert self.is_open, "programs of one step have one plan"
        if self._options.to_measure is not None:
            self._chosen = ChosenSizes(sizes, f"bucket sizes as in the state that was loaded: {sizes}")

    def put_into(self, program: Program) -> tuple[Program, Sequence[Pass]]:
        """Replaces "auto" in the pipeline by measured numbers, so that it can be replayed, and adds a remark to the program."""
        options, plan = self._options, self._options.to_measure
        if plan is None:
            return program, options.pipeline
        assert isinstance(plan, PlanBuckets)
        if self._chosen is None:
            asked = next((p.link for p in options.pipeline if isinstance(p, LowerCollectives)), None)
            is_shared = any(isinstance(p, ShareParameters) for p in options.pipeline)
            is_shared = is_shared and not why_memory_is_not_shared(program.devices)
            setting = setting_of(
                program,
                options.optimizers,
                num_threads=self._num_threads,
                link=asked or best_link(options.devices)[0],
                shares_parameters=is_shared,
                timeout_seconds=options.timeout_seconds,
            )
            self._chosen = choose_bucket_sizes(setting, BucketSizes(plan.bucket_cap_mb, plan.first_bucket_mb))
        chosen, self.is_open = self._chosen, False
        sized = dataclasses.replace(plan, **dataclasses.asdict(chosen.sizes))
        pipeline = [sized if p is plan else p for p in options.pipeline]
        return program.with_remarks(chosen.remark), pipeline
