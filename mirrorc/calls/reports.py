"""Reports of a step."""

from __future__ import annotations

import importlib.metadata
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import fx

from mirrorc.analysis.communication.worker_meetings import schedule_hash
from mirrorc.calls.program_runs import ProgramRuns
from mirrorc.calls.worker_batch import part_of_worker
from mirrorc.capture.call.signature import fewest_examples
from mirrorc.capture.model.model_state import ModelState
from mirrorc.compilation.specializer import Specializer
from mirrorc.errors import ExecutionError
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted
from mirrorc.options.gradient_clipping import measured_norms
from mirrorc.options.step_options import StepOptions
from mirrorc.report.page import load_report, write_report
from mirrorc.report.step_report import metrics_of, step_report
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.memory.estimate import report_memory
from mirrorc.runtime.memory.report import MemoryReport
from mirrorc.runtime.profiling.explain_steps import explain_steps
from mirrorc.runtime.profiling.explanation import Explanation
from mirrorc.runtime.profiling.prediction import Foundations
from mirrorc.runtime.profiling.recorder import RecordedStep, recorded_steps
from mirrorc.runtime.profiling.timeline import write_timeline
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.state.variables.step_variables import MirroredVariable, mirrored_variables

_T = TypeVar("_T")


class StepReports(ABC):
    def __init__(
        self, options: StepOptions, model: ModelState, state: StepState, runs: ProgramRuns, specializer: Specializer
    ) -> None:
        self._options, self._model, self._state, self._runs = options, model, state, runs
        self._specializer = specializer
        self._memory: WeakKeyDictionary[Executor, MemoryReport] = WeakKeyDictionary()

    @abstractmethod
    def _exclusively(self, function: Callable[[], _T]) -> _T:
        pass

    @abstractmethod
    def _foundations(self) -> Foundations | None:
        """Measured facts for predictions; None for a process on its own."""

    @property
    def program(self) -> Program:
        """The lowered program that has trained most often; ``print(step.program)`` shows the schedule.

        Before the first update it is the program of the last call, or of `prepare`. `programs` has all programs.
        """
        return self._executor_of(None).program

    @property
    def programs(self) -> tuple[Program, ...]:
        """The compiled programs, one for each kind of call and sizes of arguments; that of the last call comes last."""
        return tuple(executor.program for executor in self._runs.called)

    def _executor_of(self, program: Program | None) -> Executor:
        if program is None:
            main = self._runs.main
            if main is None:
                raise problem(
                    ExecutionError, "MC5005: there is no program yet", "the first call compiles it", self._first_calls
                )
            return main
        executor = next((executor for executor in self._runs.called if executor.program is program), None)
        if executor is None:
            fix = ("program=None, for the main one", "one of .programs, of this step or module")
            raise problem(ValueError, "MC5005: the program that was given is not one of this step", fix=fix)
        return executor

    @property
    def _first_calls(self) -> tuple[str, ...]:
        is_module = self._options.is_module
        return ("loss_fn(model(x), y).backward()",) if is_module else ("step(x, y)", "step.prepare(x, y)")

    @property
    def rank(self) -> int:
        """The number of this worker; 0 in a process on its own."""
        return self._options.program_workers.rank

    @property
    def num_workers(self) -> int:
        """The number of workers; 1 in a process on its own."""
        return self._options.program_workers.num_workers

    @property
    def num_replicas(self) -> int:
        """The number of replicas on all workers."""
        return self._options.program_workers.num_all_replicas or len(self._options.devices)

    @property
    def is_chief(self) -> bool:
        """True for worker 0, whose values all workers get at the start."""
        return self.rank == 0

    def shard_batch(self, batch: _T) -> _T:
        """This worker's shard of a batch that every worker has whole, as by `mirrorc.shard_batch`.

        If all workers call ``step(step.shard_batch(x), target=step.shard_batch(y))``, this equals one call with the
        whole batch, in one process over all devices. The batch may be too small for all replicas. Each replica gets two
        examples if BatchNorm needs them. If torch refuses single examples for another reason (``F.batch_norm`` with
        ``training=True``), each worker splits its own shard. Buffers may differ after a batch that leaves a replica
        without examples.
        """
        return part_of_worker(
            batch, self._options.program_workers, fewest_examples(self._options.model, self._options.loss_fn)
        )

    @property
    def schedule_hash(self) -> str:
        """A hash of the exchanges between workers in the last program; the same on all workers.

        Raises:
            ExecutionError: there is no program yet, or no other worker.
        """
        program = (self._runs.last_update or self._executor_of(None)).program
        if not program.workers.are_several:
            fix = "torchrun --nproc-per-node=2 train.py"
            raise problem(ExecutionError, "MC5005: nothing is exchanged: there is no worker besides this one", fix=fix)
        return schedule_hash(program)

    @property
    def graphs(self) -> Mapping[str, fx.GraphModule]:
        """The lowered graph of each device, by name."""
        return self.program.device_graphs

    @property
    def variables(self) -> Mapping[str, MirroredVariable]:
        """The variables of the last call's program, by name. A tied weight has an entry for each name.

        Names of tensors of modules outside of the model begin with ``outside.``.

        Raises:
            ExecutionError: there is no program yet, or a lost connection to workers has left variables partly updated.
        """
        last = self._runs.last or self._executor_of(None)
        program = last.program
        self._state.refuse_if_torn()
        if not self._state.store.has(program):
            self._exclusively(lambda: last.state.prepare_for(program))
        elif self._state.is_behind and not self._state.callers.now:  # a running call catches up itself
            self._exclusively(self._state.catch_up)
        return mirrored_variables(program, self._state.store, self._model.names)

    @property
    def num_skipped(self) -> int:
        """With ``check_finite="skip"``, the number of steps without an update."""
        return self._state.num_skipped

    @property
    def num_accumulated(self) -> int:
        """The number of examples in the gradients accumulated for the next update."""
        return self._state.accumulated.num_examples

    @property
    def grad_norm(self) -> Any:
        """The norm of the last step's gradients over the whole batch before clipping, a scalar on the first device.

        If ``clip_grad_norm`` has a bound for each group of the optimizers, a tuple with a norm for each group (None if
        unbounded). NaN if the step was skipped.

        Raises:
            ExecutionError: the norm was not measured.
        """
        last = self._runs.last_update
        num_groups = len(self._options.optimizers)
        norms = last and measured_norms(
            self._state.results, last.program, num_groups, is_skipped=last.commit.is_skipped
        )
        if norms is None:
            why = "a training call measures it, if the step was compiled with clip_grad_norm="
            fix = ("step(x, y) first", "mirrorc.compile(..., clip_grad_norm=math.inf), which only measures")
            raise problem(ExecutionError, "MC5005: no norm was measured yet", why, fix)
        return norms

    def explain(self, program: Program | None = None) -> Explanation:
        """Explains the time of the last training steps; printed, `Explanation` is a table with a row for each bucket.

        Args:
            program: one of `programs`; None for `program`.

        Raises:
            ValueError: the program is of another step.
            ExecutionError: no step of this program was recorded.
        """
        executor, steps = self._recorded(program)
        return explain_steps(executor.program, steps, executor.is_interleaved, self._foundations())

    def memory(self, program: Program | None = None) -> MemoryReport:
        """Reports the memory of a step, in bytes by device and kind; printed, `MemoryReport` is a table.

        No step need have run: `prepare` is enough.

        Args:
            program: as for `explain`.

        Raises:
            ValueError: the program is of another step.
            ExecutionError: there is no program yet.
        """
        executor = self._executor_of(program)
        return report_memory(executor.program, executor.regions, self._state)

    def timeline(self, path: str | os.PathLike[str], program: Program | None = None) -> Path:
        """Writes the last training steps as a trace for https://ui.perfetto.dev or chrome://tracing; returns its path.

        Args:
            path: of a JSON file, compressed if it ends in ``.gz``. Missing folders are made.
            program: as for `explain`.

        Raises:
            ValueError: the program is of another step.
            ExecutionError: no step of this program was recorded.
        """
        executor, steps = self._recorded(program)
        return write_timeline(path, executor.program, steps)

    def report(
        self,
        path: str | os.PathLike[str],
        program: Program | None = None,
        *,
        compare: str | os.PathLike[str] | None = None,
    ) -> Path:
        """Writes an HTML file about a recorded step of median time, with the tables of `explain` and `memory`.

        It shows each device's calls, messages and activations on one clock, the commit, the buckets, and the printed
        program, with links between bars and lines. The file needs no network.

        Args:
            path: of the file. Missing folders are made.
            program: as for `explain`.
            compare: an earlier report, or a saved program, for which a step is predicted. The file then has both
                figures side by side, and the differing lines of the programs.

        Raises:
            ValueError: the program is of another step, or ``compare`` is neither a report nor a program.
            ExecutionError: no step of this program was recorded.
        """
        earlier = load_report(compare) if compare is not None else None
        executor, steps = self._recorded(program)
        explanation = explain_steps(executor.program, steps, executor.is_interleaved, self._foundations())
        memory = report_memory(executor.program, executor.regions, self._state)
        shown = sorted(steps, key=lambda step: (step.warms_up, step.ended_ns - step.begun_ns))
        step = shown[(len(shown) - shown[-1].warms_up) // 2 if len(shown) > 1 else 0]
        facts = {
            "model": type(self._options.model).__name__,
            "devices": ", ".join(device.name for device in executor.program.devices),
            "worker": f"{self.rank} of {self.num_workers}",
            "backend": self._options.backend.name,
            "torch": str(torch.__version__),
            "mirrorc": importlib.metadata.version("mirrorc"),
            "recorded": counted(len(steps), "step"),
            "shown": f"step {steps.index(step) + 1} of them",
            "made": time.strftime("%Y-%m-%d %H:%M"),
        }
        metrics = metrics_of(explanation, memory) | self._counts()
        return write_report(path, step_report(executor.program, step, explanation, memory, facts, metrics), earlier)

    def metrics(self) -> dict[str, float]:
        """Figures of the last training step, by flat names, for a logger.

        Before the first recorded step, and with ``cuda_graphs=True``, there are only counts. Times are means over this
        worker's devices. The call takes a few milliseconds, and on a GPU waits for the step's end. Keys:

        - ``time/step_ms``: from the start of the devices to the end of the last one.
        - ``time/PART_ms`` for each part of ``explain().parts_ms``, which add up to the step: ``start``, ``forward``,
          ``backward``, ``pack``, ``launch``, ``commit``, ``skew``, ``transfer``, ``update``, ``write``, ``other``,
          ``end``.
        - ``time/compute_ms``: forward and backward. ``time/exposed_ms``: waits for communication, skew and transfer.
          ``time/hidden_ms``: communication behind other work, summed over buckets.
        - ``communication/sent_bytes``: bytes of buckets, messages or factors in flight. ``communication/launches``:
          their number.
        - ``memory/peak_bytes``: the total of `memory`, estimated once for each program. ``memory/activations_bytes``:
          the activations in it.
        - ``programs/compiled``: compilations so far. ``programs/recompiled``: those of training after the first of each
          kind.
        - ``steps/run``: training steps so far. ``steps/skipped``: those without an update.
        """
        executor = self._runs.last_update
        recorder = executor.recorder if executor is not None else None
        steps = recorder.steps(1) if recorder is not None else ()
        if executor is None or not steps:
            return self._counts()
        if executor not in self._memory:
            self._memory[executor] = report_memory(executor.program, executor.regions, self._state)
        explanation = explain_steps(executor.program, steps, executor.is_interleaved)
        return metrics_of(explanation, self._memory[executor]) | self._counts()

    def _counts(self) -> dict[str, float]:
        compiled = self._specializer.num_compilations
        again = [count - 1 for purpose, count in compiled.items() if purpose.trains]
        return {
            "programs/compiled": float(compiled.total()),
            "programs/recompiled": float(sum(again)),
            "steps/run": float(self._runs.num_updates),
            "steps/skipped": float(self._state.num_skipped),
        }

    def _recorded(self, program: Program | None) -> tuple[Executor, tuple[RecordedStep, ...]]:
        # Another thread may run the step meanwhile.
        executor = self._runs.last_update if program is None else self._executor_of(program)
        if program is None and (main := self._runs.main) is not None and main.recorder is not None:
            executor = main
        executor = executor or (self._runs.main if program is None else None)
        if self._options.cuda_graphs:
            why = "with cuda_graphs=True a step is one launch, and none of its calls has a time"
            fix = (
                "compiler=mirrorc.Compiler(cuda_graphs=False), to see where the time goes",
                "with torch.profiler.profile() as profile:, around the calls",
            )
            raise problem(ExecutionError, "MC5005: no step was recorded", why, fix)
        if executor is not None and executor.recorder is None:
            does = "accumulates gradients" if executor.program.trains else "evaluates"
            does = "leaves gradients to its caller" if executor.program.leaves_gradients else does
            why = "only programs that update parameters are timed"
            fix = (f"{self._first_calls[0]} first, and program=None", "with torch.profiler.profile() as profile:")
            raise problem(ExecutionError, f"MC5005: this program {does}, so no call of it was recorded", why, fix)
        steps = recorded_steps(executor.recorder if executor is not None else None, self._first_calls[0])
        assert executor is not None, "a step without a program has no recorded steps"
        return executor, steps
