"""Training calls of a step, and refusals of some: with options, gradients or an optimizer that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mirrorc.calls.call_lock import ExclusiveCalls
from mirrorc.calls.program_runs import ProgramRuns
from mirrorc.capture.call.call_arguments import Call
from mirrorc.capture.call.shards import Shards, split_call
from mirrorc.capture.call.signature import Signature
from mirrorc.compilation.call_kind import Purpose
from mirrorc.compilation.program_cache import Specialization
from mirrorc.compilation.specializer import Specializer
from mirrorc.coordination.coordinator import Coordinator
from mirrorc.coordination.team_coordinator import TeamCoordinator
from mirrorc.errors import ExecutionError
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.options.step_options import StepOptions
from mirrorc.passes import CheckFinite, ClipGradients
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.state.step_state import StepState
from mirrorc.torch_internals import as_subclass
from mirrorc.user.loop_warnings import CallersModes, GradientHabits, TrainedLoss


@dataclass(frozen=True)
class CompiledCall:
    """A call and its program. ``is_stale``: the user has changed the optimizer's state since the last step."""

    specialization: Specialization
    call: Call
    shards: Shards
    purpose: Purpose
    is_stale: bool

    @property
    def executor(self) -> Executor:
        return self.specialization.executor


class TrainingCalls:
    def __init__(
        self,
        signature: Signature,
        state: StepState,
        specializer: Specializer,
        coordinator: Coordinator,
        runs: ProgramRuns,
        lock: ExclusiveCalls,
        habits: GradientHabits,
        modes: CallersModes,
    ) -> None:
        self._signature, self._state = signature, state
        self._specializer, self._coordinator, self._runs = specializer, coordinator, runs
        self._lock, self._habits, self._modes = lock, habits, modes
        self._last: Executor | None = None  # of the last call that this worker made or took part in

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], purpose: Purpose) -> Any:
        """Looks up other programs until the programs of all workers match."""
        with self._coordinator.call(), self._specializer.choices.in_call():
            while True:
                self._begin(purpose)
                call, shards = self._signature.split(args, kwargs)
                compiled = self._compile(call, shards, purpose)
                self._lock.check_open()  # compiling takes long
                next_purpose = self._exchange_header(compiled)
                if next_purpose is None:
                    return self._execute(compiled)
                purpose = next_purpose

    def prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], purpose: Purpose) -> Program:
        self._state.begin_use()
        call, shards = self._signature.split(args, kwargs)
        compiled = self._compile(call, shards, purpose)
        self._coordinator.note_call(call)
        self._last = compiled.executor
        self._runs.note_prepared(compiled.executor)
        return compiled.executor.program

    def take_part(self, coordinator: TeamCoordinator) -> bool:
        """Takes part, without examples, in one call of the other workers; False if there was no call."""
        with coordinator.call(), self._specializer.choices.in_call():
            compiled = self._meet_without_examples(coordinator)
            if compiled is None:
                coordinator.team.finish()
                return False
            self._execute(compiled)
            return True

    # The stages of a call

    def _begin(self, purpose: Purpose) -> None:
        if torch.is_inference_mode_enabled():
            raise problem(
                ExecutionError,
                "MC5006: the step was called inside torch.inference_mode(), where nothing can be trained",
                fix="leave torch.inference_mode() out, around the step",
            )
        self._modes.look(trains=True)
        self._state.begin_use()
        if purpose.updates:
            self._habits.refuse_gradients_of_others()
        if purpose is Purpose.GRADIENTS:
            self._check_gradients()

    def _check_gradients(self) -> None:
        _refuse_odd_gradients(self._state.store.tensors)
        if self._state.accumulated.num_calls:
            raise problem(
                ExecutionError,
                f"MC3206: step.gradients() was called in the middle of an accumulation: {self._state.accumulated}",
                "gradients() adds to p.grad, and accumulate() keeps gradients for the step's own update",
                ("step(x, y) first, which ends the accumulation", "step.zero_grad(), to drop what is kept"),
            )
        if self._coordinator.is_in_block:
            why = "a worker that has left makes no updates of its own there"
            fix = "step.gradients(x, y) outside of step.join(), with as many batches on all workers"
            raise problem(ExecutionError, "MC6302: step.gradients() was called inside of step.join()", why, fix)

    def _compile(self, call: Call, shards: Shards, purpose: Purpose) -> CompiledCall:
        is_stale = self._state.optimizers.is_stale()
        specialization, shards = self._specializer.specialization_for(call, shards, is_stale=is_stale, purpose=purpose)
        return CompiledCall(specialization, call, shards, purpose, is_stale)

    def _exchange_header(self, compiled: CompiledCall) -> Purpose | None:
        call, shards = compiled.call, compiled.shards
        self._coordinator.note_call(call)
        rows = compiled.specialization.row_counts(shards)
        retry = self._coordinator.exchange_header(
            compiled.executor, shards.num_examples, rows, is_stale=compiled.is_stale
        )
        if retry is None:
            return None
        if retry.rows_elsewhere is not None:
            self._specializer.note_rows(call, shards, compiled.purpose, retry.rows_elsewhere)
        return Purpose.of_training(retry.accumulation)

    def _execute(self, compiled: CompiledCall) -> Any:
        executor = compiled.executor
        leaves_gradients = compiled.purpose is Purpose.GRADIENTS
        if not leaves_gradients:
            self._habits.look_for_gradients(are_used=self._state.optimizers.user_steps.have_written)
        executor.state.prepare_for(executor.program, is_stale=compiled.is_stale)
        if compiled.purpose.updates:
            self._coordinator.compare_replicas(executor.program)
        self._last = executor
        loss = self._runs.run(compiled.specialization, compiled.shards, self._coordinator)
        assert loss is not None, "a training step has a loss"
        if not leaves_gradients:
            self._habits.note_step()
        return compiled.specialization.trained(as_subclass(loss, TrainedLoss), compiled.call, compiled.shards)

    def _meet_without_examples(self, coordinator: TeamCoordinator) -> CompiledCall | None:
        """Prepares a call in which only other workers have examples. None if all workers have left their loops."""
        last, call = self._last, coordinator.call_without_examples
        if last is None or call is None:
            raise problem(
                ExecutionError,
                "MC6302: this worker has left step.join() without any call of the step",
                "without a compiled step it cannot take part in the other workers' calls",
                ("step(x[:0], y[:0]) inside of step.join(), an empty batch", "step.prepare(x, y) before it"),
            )
        self._state.begin_use()
        shards = split_call(call, len(last.program.devices), may_be_empty=True)
        purpose = Purpose.of_training(last.program.accumulation)
        self._specializer.choices.settle(last.program)
        if not self._specializer.choices.apply_to(last.program):  # it was prepared before the first call
            last = self._compile(call, shards, purpose).executor
        while True:
            retry = coordinator.exchange_header(last, (), is_stale=self._state.optimizers.is_stale())
            if retry is None:
                break
            self._state.begin_use()
            if retry.accumulation is not last.program.accumulation:
                purpose = Purpose.of_training(retry.accumulation)
                last = self._compile(call, shards, purpose).executor
        if coordinator.agreed.is_over:
            return None
        if coordinator.rows_elsewhere is not None:
            self._specializer.note_rows(call, shards, purpose, coordinator.rows_elsewhere)
        compiled = self._compile(call, shards, purpose)
        self._lock.check_open()
        coordinator.take_part(compiled.executor, last)
        return compiled


def refuse_gradients(options: StepOptions) -> None:
    """Raises `ExecutionError` if an option would have no effect, because gradients are left to the user."""
    passes = options.pipeline
    refused = {
        "clip_grad_norm= or clip_grad_value=": (
            any(isinstance(entry, ClipGradients) for entry in passes),
            "what p.grad has already would have to be clipped together with the new gradients",
            "torch.nn.utils.clip_grad_norm_ or clip_grad_value_ after the call, in place of the option",
        ),
        "scaler=": (
            options.scaler is not None,
            "a step scales the loss and its own gradients, and these are yours",
            "mirrorc.compile(..., autocast=torch.bfloat16), without scaler=",
        ),
        "check_finite='skip'": (
            any(isinstance(entry, CheckFinite) and entry.otherwise == "skip" for entry in passes),
            "the update is yours, and only you can skip it",
            "check_finite=True, which raises an error and changes nothing",
        ),
        "cuda_graphs=True": (
            options.cuda_graphs,
            "a graph replays whole steps",
            "compiler=mirrorc.Compiler(cuda_graphs=False)",
        ),
    }
    for option, (is_present, why, fix) in refused.items():
        if is_present:
            raise problem(ExecutionError, f"MC1003: step.gradients() cannot be used with {option}", why, fix)


def _refuse_odd_gradients(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `ExecutionError` if a parameter has a gradient that torch cannot add to. Adding would fail half-way."""
    for name, tensor in tensors.items():
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is None or gradient.layout is not torch.strided:
            continue
        overlaps = any(size > 1 and stride == 0 for size, stride in zip(gradient.shape, gradient.stride(), strict=True))
        if overlaps or gradient.is_inference():
            raise problem(
                ExecutionError,
                f"MC3209: nothing can be added to the gradient of parameter {name!r}",
                "its elements share memory" if overlaps else "it was made in inference mode",
                ("p.grad = None", "p.grad = p.grad.clone()"),
            )


def refuse_update(options: StepOptions) -> None:
    """Raises `ValueError` if there is no optimizer."""
    if not options.optimizers.optimizers:
        fix = (
            "optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3)",
            "step.gradients(x, y), which leaves the gradients in p.grad for an optimizer of your own",
        )
        raise problem(ValueError, "MC1211: optimizer is missing: mirrorc.compile got none, and a step updates", fix=fix)
