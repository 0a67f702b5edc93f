"""The training step that `mirrorc.compile` returns, to be called with batches."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
from torch import fx

from mirrorc.capture.model_state import ModelState
from mirrorc.capture.shards import Shards
from mirrorc.capture.signature import Signature
from mirrorc.errors import ExecutionError
from mirrorc.gradient_habits import GradientHabits
from mirrorc.ir.program import Program
from mirrorc.options import StepOptions
from mirrorc.printing.wording import counted
from mirrorc.runtime.devices.thread_pool import DevicePool
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.execution.interrupts import InterruptGuard
from mirrorc.runtime.memory.estimate import report_memory
from mirrorc.runtime.memory.report import MemoryReport
from mirrorc.runtime.profiling.explain_steps import explain_steps
from mirrorc.runtime.profiling.explanation import Explanation
from mirrorc.runtime.profiling.recorder import RecordedStep, recorded_steps
from mirrorc.runtime.profiling.timeline import write_timeline
from mirrorc.runtime.state.bucket_optimizers import BucketOptimizers
from mirrorc.runtime.state.mirrored_variable import MirroredVariable
from mirrorc.runtime.state.replica_check import make_state
from mirrorc.runtime.state.variables import VariableStore
from mirrorc.specializer import Specializer

_T = TypeVar("_T")
_LONGEST_CLOSING_SECONDS = 5.0


class Step:
    """A compiled training step; made by `compile`. Call it with a batch; it returns the batch's loss.

    The step is compiled when it is first called with a batch. For a batch of other shapes it is specialized again, over the same
    variables. Use it as a context manager, or `close` it, to end its threads; the model keeps its weights.
    """

    def __init__(self, options: StepOptions, model: ModelState) -> None:
        self._options = options
        self._model = model
        store = VariableStore(model.tensors, options.devices)
        optimizers = BucketOptimizers(options.optimizer, store, is_captured=options.cuda_graphs)
        self._state = make_state(store, optimizers, options.check_replicas_every)
        self._habits = GradientHabits(model.parameters.values(), optimizers.user_optimizer)
        optimizers.user_steps.when_idle = self._habits.warn_of_idle_step
        on_cpu = options.devices[0].torch_device.type == "cpu"
        self._num_threads = (
            max(1, torch.get_num_threads() // len(options.devices)) if on_cpu else torch.get_num_threads()
        )
        self._guard = InterruptGuard()
        self._specializer = Specializer(options, model, self._state, self._num_threads, self._guard)
        self._last: Executor | None = None
        self._pool: DevicePool | None = None
        self._pid = os.getpid()
        self._callers: dict[str, list[int]] = {}  # the thread whose call runs now
        self._has_ended = threading.Event()  # whether the last call has ended, if it has found the step closed
        self._is_closed = False
        self._signature = Signature(
            options.model,
            options.loss_fn,
            len(options.devices),
            keeps_plain_apart=options.front_end.guards_plain_values,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on one batch: forward, backward, all-reduce, update.

        Args:
            *args: arguments of the model; tensors are split along dim 0, see `mirrorc.replicated` and `mirrorc.PerReplica`.
            **kwargs: likewise; with a loss_fn, ``target`` is the second argument of the loss_fn.

        Returns:
            The loss of the whole batch, a scalar without gradient. With ``return_outputs``, a pair of the loss and the outputs.

        Raises:
            ValueError, TypeError: a wrong argument; nothing has changed.
            CaptureError: the model cannot be captured; nothing has changed.
            ExecutionError: a device failed, or the step is closed or in use.
        """
        if torch.is_inference_mode_enabled():
            raise ExecutionError(
                "the step was called inside torch.inference_mode(), where nothing can be trained: leave it"
            )
        return self._exclusively(lambda: self._train(args, kwargs))

    def __repr__(self) -> str:
        devices = ", ".join(device.name for device in self._options.devices)
        kept = self._specializer.num_programs
        state = "closed" if self._is_closed else f"{counted(kept, 'compiled program')}" if kept else "not compiled yet"
        return f"<Step of {type(self._options.model).__name__} on {devices}, backend {self._options.backend.name}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a compiled step cannot be copied or pickled: it has threads, and it trains one model. Copy or save the model and "
            "the optimizer (their state_dict() is up to date after every step), and compile the copy"
        )

    def prepare(self, *args: Any, **kwargs: Any) -> Program:
        """Compiles for a batch like this one, without training on it."""

        def compiled() -> Program:
            call, shards = self._signature.split(args, kwargs)
            is_stale = self._state.optimizers.is_stale()
            self._last = self._specializer.specialization_for(call, shards, is_stale)[0].executor
            return self._last.program

        return self._exclusively(compiled)

    def _exclusively(self, function: Callable[[], _T]) -> _T:
        """Calls a function while no other call of the step runs, and with Ctrl-C in the hands of the guard.

        An interrupt may come between any two calls of Python. So taking and giving back are one operation each, within the
        ``try``, and what is in the ``finally`` is done with interrupts kept.
        """
        if os.getpid() != self._pid:
            raise ExecutionError(
                "the step was compiled in the parent of this forked process and its threads live there: compile it here, in "
                "the child, or start the process with the 'spawn' method"
            )
        caller, guard = threading.get_ident(), self._guard
        own = [caller]
        try:
            if self._callers.setdefault("now", own) is not own:
                raise ExecutionError(
                    "the step is running in another thread: one step changes all parameters, so steps run one after the other; "
                    "call it from one thread, or guard it with a lock"
                )
            self._check_open()
            guard.begin()
            return function()
        finally:
            if "now" in self._callers and self._callers["now"] is own:
                guard.is_ending = True
                del self._callers["now"]
                if self._is_closed:
                    self._end_threads()
                    self._has_ended.set()
                guard.end()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ExecutionError("the step is closed: its threads have ended; make a new one with mirrorc.compile()")

    def _train(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call, shards = self._signature.split(args, kwargs)
        is_stale = self._state.optimizers.is_stale()
        found, shards = self._specializer.specialization_for(call, shards, is_stale)
        executor = found.executor
        self._check_open()  # compiling takes long
        self._habits.look_for_gradients(are_used=self._state.optimizers.user_steps.have_written)
        self._state.take_over(executor.program, is_stale=is_stale)
        executor.commit.begin()
        self._guard.commit = executor.commit
        stream = torch.get_rng_state() if executor.needs_seed else None
        try:
            loss = self._run(executor, shards, found.numbers())
        except BaseException:
            if stream is not None and not executor.commit.is_decided:
                torch.set_rng_state(stream)
            raise
        if found.outputs is None:
            return loss
        try:
            return loss, found.outputs.of_step(executor.outputs.take(), loss, call)
        except Exception as error:
            raise ExecutionError(
                f"the step is done and its update is made, but its outputs could not be put together: {error}; go on with the "
                "next batch"
            ) from error

    def _run(self, executor: Executor, shards: Shards, numbers: Sequence[Sequence[int | float]]) -> torch.Tensor:
        options = self._options
        if self._pool is None:
            self._pool = DevicePool(options.devices, self._num_threads, options.timeout_seconds)
        total = sum(shards.num_examples)
        is_mean = options.loss_reduction == "mean"
        weights = [n / total if is_mean else float(n > 0) for n in shards.num_examples]
        seed = int(torch.randint(2**62, (), dtype=torch.int64)) if executor.needs_seed else None
        self._last = executor
        loss = executor.run(self._pool, shards.tensors, weights, seed, self._guard, numbers)
        self._habits.note_step()
        return loss

    @property
    def program(self) -> Program:
        """The lowered program of the last call; ``print(step.program)`` is the schedule."""
        if self._last is None:
            raise ExecutionError("there is no program yet: it is compiled at the first call, or with example_inputs=")
        return self._last.program

    @property
    def graphs(self) -> Mapping[str, fx.GraphModule]:
        """The lowered graph of each device, by name."""
        return self.program.device_graphs

    @property
    def variables(self) -> Mapping[str, MirroredVariable]:
        """The variables of the last call's program, by name; tied weights by each of their names."""
        program = self.program
        if not self._state.store.holds(program):
            self._exclusively(lambda: self._state.take_over(program))
        found = {
            name: MirroredVariable(variable, self._options.devices, self._state.store)
            for name, variable in program.variables.items()
            if name in self._model.tensors
        }
        for name, variable in self._model.names.items():
            if variable in found:
                found.setdefault(name.removeprefix("model."), found[variable])
        return found

    @property
    def num_skipped(self) -> int:
        """With ``check_finite="skip"``, the number of steps that have left their updates out."""
        return self._state.num_skipped

    def explain(self) -> Explanation:
        """Explains where the time of the last steps went; printed, `Explanation` is a table with a row for each bucket.

        Raises:
            ExecutionError: no step was recorded; says why.
        """
        program, steps = self._recorded()
        return explain_steps(program, steps, self._last is not None and self._last.is_interleaved)

    def memory(self) -> MemoryReport:
        """Reports the memory of a step, in bytes by device and kind; printed, `MemoryReport` is a table.

        It is computed from the program of the last call, or of `prepare`; no step need have run.

        Raises:
            ExecutionError: there is no program yet.
        """
        program, last = self.program, self._last
        assert last is not None, "a step with a program has an executor"
        return report_memory(program, last.regions, self._state.optimizers)

    def timeline(self, path: str | os.PathLike[str]) -> Path:
        """Writes the calls of the last steps as a trace for https://ui.perfetto.dev or chrome://tracing; returns its path.

        Args:
            path: the file to write, as JSON; compressed if it ends in ``.gz``. Folders that are missing are made.

        Raises:
            ExecutionError: no step was recorded; says why.
        """
        return write_timeline(path, *self._recorded())

    def _recorded(self) -> tuple[Program, tuple[RecordedStep, ...]]:
        last = self._last  # another thread may run the step meanwhile
        if self._options.cuda_graphs:
            raise ExecutionError(
                "no step was recorded: with cuda_graphs=True a step is one launch, and none of its calls has a time of its "
                "own; compile with cuda_graphs=False to see where the time goes, or profile with torch.profiler"
            )
        steps = recorded_steps(self._options.record, last.recorder if last is not None else None)
        assert last is not None, "a step without a program has no recorded steps"
        return last.program, steps

    def close(self) -> None:
        """Ends the threads. The model and the optimizer keep their values; the step cannot be called again.

        A call that runs in another thread is stopped, unless it is committed, and is waited for, at most 5 seconds: it ends the
        threads when it ends.
        """
        self._is_closed = True
        running, last = self._callers.get("now"), self._last
        if running is not None and running[0] != threading.get_ident():
            if last is not None:
                last.interrupt()
            self._has_ended.wait(_LONGEST_CLOSING_SECONDS)
        if "now" not in self._callers:
            self._end_threads()

    def _end_threads(self) -> None:
        self._habits.close()
        self._state.optimizers.user_steps.close()
        if self._pool is not None:
            self._pool.close()
        self._specializer.release()

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
