"""Runs compiled programs on the threads of a step's devices."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mirrorc.capture.call.shards import Shards
from mirrorc.compilation.program_cache import Specialization
from mirrorc.coordination.coordinator import Coordinator
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.devices.thread_pool import DevicePool
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.execution.interrupts import InterruptGuard
from mirrorc.runtime.state.gradients.accumulated_gradients import Examples


@dataclass(frozen=True)
class Draws:
    seed: int | None = None
    numbers: Sequence[Sequence[int | float]] = ()


class ProgramRuns:
    """Runs programs, one at a time, at most ``step_seconds`` each."""

    def __init__(self, options: StepOptions, num_threads: int, step_seconds: float, interrupts: InterruptGuard) -> None:
        self._options, self._num_threads, self._step_seconds = options, num_threads, step_seconds
        self._interrupts = interrupts
        self.pool: DevicePool | None = None  # None before the first run
        self.last: Executor | None = None  # of the last call or of `prepare`
        self.last_update: Executor | None = None
        self.num_updates = 0
        self.draws = Draws()  # of the last run
        # In the order of their last calls. Other threads read this while a step runs. Weak, as the cache may drop programs.
        self._called: tuple[weakref.ref[Executor], ...] = ()
        self._main: Executor | None = None

    @property
    def called(self) -> list[Executor]:
        """The cached programs; the program of the last call comes last."""
        return [executor for reference in self._called if (executor := reference()) is not None]

    @property
    def main(self) -> Executor | None:
        """The program with the most updates, the last to run among equals. Before any update, the last called."""
        return self._main or self.last

    def note_prepared(self, executor: Executor) -> None:
        self._note_call(executor)
        self.last_update = executor

    def _note_call(self, executor: Executor) -> None:
        if executor is not self.last:
            self.last = executor
            others = tuple(reference for reference in self._called if reference() not in (None, executor))
            self._called = (*others, weakref.ref(executor))

    def _note_update(self, executor: Executor) -> None:
        self.num_updates += 1
        executor.num_updates += 1
        if self._main is None or executor.num_updates >= self._main.num_updates:
            self._main = executor

    def run(self, compiled: Specialization, shards: Shards, coordinator: Coordinator) -> torch.Tensor | None:
        """Returns the loss of all workers' examples. A failure before the commit restores the random generators."""
        executor = compiled.executor
        if executor.updates:
            self.last_update = executor
        executor.commit.begin()
        self._interrupts.commit = executor.commit
        generator_state = torch.get_rng_state() if executor.needs_seed else None
        undo_step = compiled.guards.begin_step()
        try:
            numbers = compiled.numbers()
            seed = coordinator.seed(int(torch.randint(2**62, (), dtype=torch.int64)) if executor.needs_seed else None)
            self.draws = Draws(seed, numbers)
            examples = coordinator.examples(sum(shards.num_examples))
            is_mean = self._options.loss_reduction == "mean"
            weights = [n / examples.of_all if is_mean else float(n > 0) for n in shards.num_examples]
            self._note_call(executor)
            with coordinator.random_stream(executor.program):
                pool, sizes = self._running_pool(), compiled.sizes_of(shards)
                loss = executor.run(pool, shards.tensors, weights, examples, seed, self._interrupts, numbers, sizes)
            if executor.updates:
                self._note_update(executor)
            return coordinator.end_call(executor, loss, compiled.loss_dtype)
        except BaseException:
            if not executor.commit.is_decided:
                if generator_state is not None:
                    torch.set_rng_state(generator_state)
                undo_step()
            raise

    def run_backward(
        self,
        executor: Executor,
        tensors: Sequence[Sequence[torch.Tensor]],
        weights: Sequence[float],
        examples: Examples,
        draws: Draws,
        sizes: Sequence[Sequence[int | float]],
    ) -> None:
        """Runs a program of backward with the seed and numbers of its forward."""
        executor.commit.begin()
        self._interrupts.commit = executor.commit
        self._note_call(executor)
        seed, numbers = draws.seed, draws.numbers
        executor.run(self._running_pool(), tensors, weights, examples, seed, self._interrupts, numbers, sizes)

    def _running_pool(self) -> DevicePool:
        if self.pool is None:
            self.pool = DevicePool(self._options.devices, self._num_threads, self._step_seconds)
        return self.pool

    def interrupt(self) -> None:
        if self.last is not None:
            self.last.interrupt()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
