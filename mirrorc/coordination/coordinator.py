"""Coordination of a step's training calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from mirrorc.analysis.cost.link_speed import LinkSpeed
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
    """The stages of a training call in which workers meet; `LocalCoordinator` meets nobody."""

    @property
    def team(self) -> Team | None:
        """None for a process alone."""
        ...

    @property
    def link(self) -> LinkSpeed | None:
        """None if nothing was measured."""
        ...

    @property
    def step_seconds(self) -> float:
        """The longest time of a step on the devices."""
        ...

    def begin_call(self) -> None:
        """Other calls of the step may still run."""
        ...

    def call(self) -> AbstractContextManager[None]:
        """A block around one training call: an exception on any worker ends it on all."""
        ...

    def note_call(self, call: Call) -> None:
        """For calls without examples."""
        ...

    def exchange_header(self, executor: Executor, num_examples: Sequence[int], *, is_stale: bool) -> Retry | None:
        """Waits for the headers of all workers, and may broadcast the parameters of the chief.

        Returns:
            None if the call goes on with this program.
        """
        ...

    def compare_replicas(self, program: Program) -> None:
        """Compares the workers' copies of variables, if this step is due."""
        ...

    def examples(self, local: int) -> Examples:
        """``local``: of this process."""
        ...

    def seed(self, local: int | None) -> int | None:
        """``local``: drawn in this process, None if the program draws no random numbers."""
        ...

    def random_stream(self, program: Program) -> AbstractContextManager[None]:
        """A block in which optimizers draw random numbers."""
        ...

    def reduce_loss(
        self, executor: Executor, loss: torch.Tensor | None, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        """Returns the loss of all examples."""
        ...

    def joined_steps(
        self,
        take_part: Callable[[TeamCoordinator], bool],
        exclusively: Callable[[Callable[[], Any]], Any],
        is_closed: Callable[[], bool],
    ) -> list[JoinedStep]:
        """Empty for a process alone."""
        ...

    def gather_optimizer_state(self, exclusively: Callable[[Callable[[], None]], None]) -> None:
        """Makes sharded state whole."""
        ...

    def note_failure(self, error: BaseException) -> None:
        """For the other workers, when this one leaves."""
        ...

    def close(self) -> None:
        """May be repeated."""
        ...


class LocalCoordinator:
    """Also for evaluations, which every worker makes alone."""

    team: Team | None = None
    link: LinkSpeed | None = None

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds

    def begin_call(self) -> None:
        pass

    def call(self) -> AbstractContextManager[None]:
        return nullcontext()

    def note_call(self, call: Call) -> None:
        pass

    def exchange_header(self, executor: Executor, num_examples: Sequence[int], *, is_stale: bool) -> Retry | None:
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
    """Compares the step with those of the other workers."""
    if options.cluster is None:
        return LocalCoordinator(options.timeout_seconds)
    return TeamCoordinator(options, model, state)
