"""The interface between a training call and other workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from mirrorc.analysis.cost.link_speed import LinkSpeed
from mirrorc.analysis.gradients.sent_factors import Counts
from mirrorc.capture.call.call_arguments import Call
from mirrorc.capture.model.model_state import ModelState
from mirrorc.coordination.team_coordinator import Retry, TeamCoordinator
from mirrorc.coordination.uneven_inputs import JoinedStep
from mirrorc.ir.program import Program
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.state.gradients.accumulated_gradients import Examples
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.workers.team.team import Team


class Coordinator(Protocol):
    """The stages of a training call in which workers communicate."""

    @property
    def team(self) -> Team | None:
        """None for a process on its own."""
        ...

    @property
    def link(self) -> LinkSpeed | None:
        """None if the link's speed was not measured."""
        ...

    @property
    def step_seconds(self) -> float: ...

    @property
    def is_in_block(self) -> bool:
        """True in a block of `mirrorc.join`."""
        ...

    def begin_call(self) -> None:
        """Runs before a call of the user's loop, while other calls of the step may still run."""
        ...

    def call(self) -> AbstractContextManager[None]:
        """An exception in the context, on any worker, ends the call on all workers."""
        ...

    def note_call(self, call: Call) -> None:
        """Keeps a call's structure for later calls without examples."""
        ...

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

        Args:
            row_counts: the numbers of rows in the factors that this worker sends.
            backward: of a forward of a module: its numbers of gathered rows are compared, too.

        Returns:
            The program to look up before the next exchange; None if the call continues with this program.
        """
        ...

    def compare_replicas(self, program: Program) -> None: ...

    def examples(self, local: int) -> Examples: ...

    def seed(self, local: int | None) -> int | None:
        """``local`` is None if the program draws no random numbers."""
        ...

    def random_stream(self, program: Program) -> AbstractContextManager[None]:
        """Makes optimizers draw the same random numbers on all workers."""
        ...

    def reduce_loss(
        self, executor: Executor, loss: torch.Tensor | None, dtype: torch.dtype | None
    ) -> torch.Tensor | None: ...

    def union(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, True if any worker has set it."""
        ...

    def end_backward(self, program: Program) -> None:
        """Makes the buffers that forward has written equal on all workers."""
        ...

    def joined_steps(
        self,
        take_part: Callable[[TeamCoordinator], bool],
        exclusively: Callable[[Callable[[], Any]], Any],
        is_closed: Callable[[], bool],
    ) -> list[JoinedStep]:
        """A list with this step for `mirrorc.join`; empty for a process on its own."""
        ...

    def gather_optimizer_state(self, exclusively: Callable[[Callable[[], None]], None]) -> None: ...

    def note_failure(self, error: BaseException) -> None: ...

    def close(self) -> None:
        """Idempotent."""
        ...


class LocalCoordinator:
    """The coordinator of a process on its own, and of evaluations, which workers run alone."""

    team: Team | None = None
    link: LinkSpeed | None = None
    is_in_block = False

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds

    def begin_call(self) -> None:
        pass

    def call(self) -> AbstractContextManager[None]:
        return nullcontext()

    def note_call(self, call: Call) -> None:
        pass

    def exchange_header(
        self,
        executor: Executor,
        num_examples: Sequence[int],
        row_counts: Counts = (),
        *,
        is_stale: bool = False,
        backward: Executor | None = None,
    ) -> Retry | None:
        return None

    def compare_replicas(self, program: Program) -> None:
        pass

    def examples(self, local: int) -> Examples:
        return Examples(local, local)

    def seed(self, local: int | None) -> int | None:
        return local

    def random_stream(self, program: Program) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce_loss(
        self, executor: Executor, loss: torch.Tensor | None, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        return loss

    def union(self, flags: Sequence[bool]) -> list[bool]:
        return [*flags]

    def end_backward(self, program: Program) -> None:
        pass

    def joined_steps(
        self,
        take_part: Callable[[TeamCoordinator], bool],
        exclusively: Callable[[Callable[[], Any]], Any],
        is_closed: Callable[[], bool],
    ) -> list[JoinedStep]:
        return []

    def gather_optimizer_state(self, exclusively: Callable[[Callable[[], None]], None]) -> None:
        pass

    def note_failure(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


def coordinator_of(options: StepOptions, model: ModelState, state: StepState) -> Coordinator:
    """Several workers first compare their arguments of `mirrorc.compile`."""
    if options.cluster is None:
        return LocalCoordinator(options.timeout_seconds)
    return TeamCoordinator(options, model, state)
