"""The stages of a training call in which workers communicate, for a process on its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from mirrorc.analysis.communication.worker_meetings import RowsElsewhere
from mirrorc.analysis.cost.link_speed import LinkSpeed
from mirrorc.analysis.gradients.sent_factors import Counts
from mirrorc.capture.call.call_arguments import Call
from mirrorc.ir.program import Accumulation, Program
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.state.gradients.accumulated_gradients import Examples
from mirrorc.runtime.workers.team.team import Team


@dataclass(frozen=True)
class Retry:
    """The program that a worker looks up before the next exchange of headers. ``rows_elsewhere`` is None if unknown."""

    accumulation: Accumulation
    rows_elsewhere: RowsElsewhere | None


class Coordinator:
    """Coordinates a process on its own, and evaluations, which workers run alone. `TeamCoordinator` communicates."""

    team: Team | None = None

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds

    @property
    def link(self) -> LinkSpeed | None:
        """None if the link's speed was not measured."""
        return None

    @property
    def is_in_block(self) -> bool:
        """True in a block of `mirrorc.join`."""
        return False

    def begin_call(self) -> None:
        """Runs before a call of the user's loop, while other calls of the step may still run."""

    def call(self) -> AbstractContextManager[None]:
        """An exception in the context, on any worker, ends the call on all workers."""
        return nullcontext()

    def note_call(self, call: Call) -> None:
        """Keeps a call's structure for later calls without examples."""

    def exchange_header(
        self,
        executor: Executor,
        num_examples: Sequence[int],
        row_counts: Counts = (),
        *,
        is_stale: bool = False,
        backward: Executor | None = None,
    ) -> Retry | None:
        """Exchanges headers with all workers, and broadcasts one worker's values if they agree to.

        Returns the program to look up before the next exchange; None if the call continues with this program. For
        forward of a module, gathered rows of its ``backward`` are compared, too.
        """
        return None

    def compare_replicas(self, program: Program) -> None:
        pass

    def examples(self, local: int) -> Examples:
        return Examples(local, local)

    def seed(self, local: int | None) -> int | None:
        """``local`` is None if the program draws no random numbers."""
        return local

    def random_stream(self, program: Program) -> AbstractContextManager[None]:
        """Makes optimizers draw the same random numbers on all workers."""
        return nullcontext()

    def end_call(self, executor: Executor, loss: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
        return loss

    def union(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, True if any worker has set it."""
        return [*flags]

    def end_backward(self, program: Program) -> None:
        """Makes the buffers that forward has written equal on all workers."""

    def gather_optimizer_state(self, exclusively: Callable[[Callable[[], None]], None]) -> None:
        pass

    def note_failure(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        """Idempotent."""
