"""The training step that `mirrorc.compile` returns."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch

from mirrorc.calls.call_lock import ExclusiveCalls
from mirrorc.calls.module_calls import ModuleCalls
from mirrorc.calls.program_runs import ProgramRuns
from mirrorc.calls.reports import StepReports
from mirrorc.calls.training import TrainingCalls, refuse_gradients, refuse_update
from mirrorc.calls.training_state import TrainingState
from mirrorc.capture.call.signature import Signature
from mirrorc.capture.model.function_module import FunctionModule
from mirrorc.capture.model.model_state import ModelState
from mirrorc.compilation.call_kind import Purpose
from mirrorc.compilation.choices.saved_choices import SavedChoices
from mirrorc.compilation.specializer import Specializer
from mirrorc.coordination.coordinator import Coordinator
from mirrorc.coordination.team_coordinator import TeamCoordinator
from mirrorc.coordination.uneven_inputs import JoinedStep, until_all_have_left
from mirrorc.errors import ExecutionError
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import warn
from mirrorc.messages.wording import counted
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.devices.machine import measured_machine
from mirrorc.runtime.execution.interrupts import InterruptGuard
from mirrorc.runtime.profiling.prediction import Foundations
from mirrorc.runtime.state.gradients.accumulated_gradients import AccumulatedGradients
from mirrorc.runtime.state.optimizers.loss_scale import LossScale
from mirrorc.runtime.state.replica_check import make_state
from mirrorc.runtime.state.shared.shared_state import held_state
from mirrorc.user.loop_warnings import CallersModes, GradientHabits

_T = TypeVar("_T")


class Step(StepReports):
    """A compiled training step, the result of `compile`. Call it with a batch; it returns the batch's loss.

    The first call compiles it, and so may a batch of other shapes. Use it as a context manager, or `close` it, to end
    its threads; the model keeps its weights.
    """

    def __init__(self, options: StepOptions, model: ModelState) -> None:
        self._signature = Signature(
            options.model,
            options.loss_fn,
            len(options.devices),
            microbatches=options.microbatches,
            are_several=options.program_workers.are_several,
            is_module=options.is_module,
        )
        held = held_state(model.tensors, options.devices, options.optimizers, is_captured=options.cuda_graphs)
        hold = held.hold(model.tensors, options.optimizers, type(options.model).__name__)
        groups = hold.optimizers.groups  # one count for all steps with these optimizers
        remarks = (*options.remarks, *([held.remark] if held.remark else []))
        options = replace(options, optimizers=groups, remarks=remarks)
        state = make_state(hold, options.check_replicas_every)
        if options.scaler is not None:
            state.loss_scale = LossScale(options.scaler, options.devices)
        interrupts = InterruptGuard()
        self._lock = ExclusiveCalls(interrupts, state.callers, is_module=options.is_module)
        self._modes = CallersModes(captures=options.ladder.names[0] != "autograd")
        pending = _ZeroableGradients(state.accumulated, model.tensors, self._lock)
        self._habits = GradientHabits(model.parameters.values(), options.optimizers, pending)
        state.optimizers.user_steps.tell_when_idle(self._habits.warn_of_idle_step)
        try:
            self._coordinator = Coordinator(options.timeout_seconds)
            if options.cluster is not None:
                self._coordinator = TeamCoordinator(options, model, state)
        except BaseException:  # other workers do not compile this step
            state.close()
            raise
        on_cpu = options.devices[0].torch_device.type == "cpu"
        num_threads = max(1, torch.get_num_threads() // len(options.devices)) if on_cpu else torch.get_num_threads()
        runs = ProgramRuns(options, num_threads, self._coordinator.step_seconds, interrupts)
        specializer = Specializer(options, model, state, num_threads, interrupts, self._coordinator.team)
        super().__init__(options, model, state, runs, specializer)
        choices = SavedChoices(specializer.choices.exchange, options)
        self._training_state = TrainingState(options, model, state, choices, specializer.sizes)
        self._training = TrainingCalls(
            self._signature, state, self._specializer, self._coordinator, runs, self._lock, self._habits, self._modes
        )

    def __getattr__(self, name: str) -> Any:
        if name == "synchronize":
            why = "nothing is in flight when a call returns"
            fix = "leave step.synchronize() out"
            raise problem(AttributeError, "MC1006: a step has no synchronize() any more", why, fix)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            why = "options are fixed by mirrorc.compile()"
            fix = (
                f"mirrorc.compile(..., {name}=...), for an option",
                "optimizer.param_groups, for the learning rate and the like",
            )
            raise problem(AttributeError, f"MC1601: step.{name} cannot be set", why, fix)
        super().__setattr__(name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on one batch: forward, backward, all-reduce, update.

        Without an optimizer, only `gradients` and `evaluate` can be called.

        Args:
            *args: arguments of the model; tensors are split along dim 0, see `mirrorc.replicated`, `mirrorc.examples`,
                `mirrorc.batch_dim` and `mirrorc.PerReplica`. With a loss_fn, the last one is its second argument:
                ``step(x, y)``.
            **kwargs: likewise; the second argument of loss_fn is ``target``.

        Returns:
            The loss of the whole batch, a scalar without gradient. With ``return_outputs``, a pair of the loss and the
                outputs.

        Raises:
            ValueError, TypeError: a wrong argument; nothing has changed.
            CaptureError: the model cannot be captured; nothing has changed.
            ExecutionError: a device failed, or the step is closed or in use.
        """
        refuse_update(self._options)
        return self._train(args, kwargs, self._purpose_of_step)

    def gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward on one batch, and adds the gradient of the whole batch to ``p.grad`` of the
        parameters.

        Nothing is updated; you call ``optimizer.step()``. Like ``loss.backward()``, it adds to ``p.grad`` of all
        parameters that require a gradient and affect the loss, with or without an optimizer. Buffers are written as in
        training. All workers call it, and each gets the sum over the examples of all workers.

        Args:
            *args, **kwargs: as for a training call.

        Returns:
            The loss of the whole batch; with ``return_outputs``, a pair of the loss and the outputs.

        Raises:
            ExecutionError: with ``clip_grad_norm``, ``clip_grad_value``, ``scaler``, ``check_finite="skip"`` or
                ``cuda_graphs``; during an accumulation; in a block of `join`. Nothing has changed.
            As a training call; nothing has changed then.
        """
        refuse_gradients(self._options)
        return self._train(args, kwargs, lambda: Purpose.GRADIENTS)

    def accumulate(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward and backward on one batch, and keeps its gradients for the next training call.

        The next training call updates by the gradient of the mean loss over the examples of all accumulated batches and
        its own; with ``loss_reduction="sum"``, of the sum. Buffers are written as in training. ``zero_grad`` of step,
        optimizer or model drops accumulated gradients; failed calls, evaluations and batches of other shapes do not.
        All workers call it, and each accumulates the gradients of its own examples.

        Args:
            *args, **kwargs: as for a training call.

        Returns:
            The loss of this batch; with ``return_outputs``, a pair of the loss and the outputs.

        Raises:
            As a training call; nothing has changed then.
        """
        refuse_update(self._options)
        if self._options.cuda_graphs:
            why = "a graph replays the weights of one number of examples"
            fix = "compiler=mirrorc.Compiler(cuda_graphs=False)"
            raise problem(ExecutionError, "MC1003: step.accumulate() cannot be used with cuda_graphs=True", why, fix)
        return self._train(args, kwargs, lambda: Purpose.ACCUMULATION)

    def join(self) -> AbstractContextManager[None]:
        """A context for a loop that may end earlier on some workers: ``with step.join():``, on every worker.

        A worker whose loop has ended takes part in the training calls of the others, without examples and without a
        forward. It makes the same updates, with hyperparameters from a worker in its loop. Its own hyperparameters are
        restored at the end, and its schedulers do not advance. It waits for the others as long as they send heartbeats.
        An exception in the context ends the next call of the others. In a process on its own, the context does nothing.

        Raises:
            ExecutionError: the context is nested in another one; another step over workers is called inside of it, see
                `mirrorc.join`; or, at the end, this worker has never called the step.
            CommunicationError: at the end, another worker fails; its update was not made.
        """
        return until_all_have_left(self.joined())

    def joined(self) -> list[JoinedStep]:
        """A list with this step for `mirrorc.join`; empty in a process on its own."""
        coordinator = self._coordinator
        if not isinstance(coordinator, TeamCoordinator):
            return []
        take_part = functools.partial(self._exclusively, lambda: self._training.take_part(coordinator))
        return [JoinedStep(coordinator, take_part, self._exclusively, lambda: self._lock.is_closed)]

    def gather_optimizer_state(self) -> None:
        """Gathers the whole optimizer state into the user's optimizers, on all workers, until the next training call.

        With ``Memory(shard_optimizer=True)`` each worker has a shard of the state, and ``optimizer.state_dict()``
        raises an error until all workers have called this method. Without the option it does nothing. Call it before
        `close`, which drops the other workers' shards.

        Raises:
            ExecutionError: called inside of `join`, of this step or of another, or the step is closed.
            CommunicationError: another worker fails, or makes another call.
        """
        self._coordinator.gather_optimizer_state(self._exclusively)

    def zero_grad(self) -> None:
        """Drops the gradients accumulated by `accumulate`."""
        self._exclusively(self._state.accumulated.clear)

    def state_dict(self) -> dict[str, Any]:
        """The whole training state, from which a new process continues with the same bits.

        It has the states of the model, of a loss module, of the optimizers and of the scaler; buffers that
        ``model.state_dict()`` leaves out; per-replica buffers; and the choice of gradients exchanged as factors,
        because another run may measure other times. The entry ``worker`` has this process's random streams (torch's,
        Python's, NumPy's) and residuals of compression; all else is equal on all workers. As in
        `torch.nn.Module.state_dict`, tensors are not copied: save or copy them before the next call. ``torch.load(path,
        weights_only=True)`` loads it. Schedulers, the position in the data, and tensors of modules outside of model and
        loss are yours to save. See `mirrorc.save_checkpoint`.

        With ``Memory(shard_optimizer=True)``, all workers must call it, because it gathers the optimizer state.

        Raises:
            ExecutionError: gradients are accumulated for a later update, or parameters are partly updated.
            CommunicationError: as `gather_optimizer_state`.
        """
        self.gather_optimizer_state()
        return self._exclusively(self._training_state.state_dict)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Loads the training state of an earlier run, on any number of devices; call it on all workers.

        Model, optimizers and scaler are loaded in place. Accumulated gradients are dropped. With as many devices and
        workers as before, the run continues with the same bits, unless several sizes of its batches change. Otherwise
        replicas begin with the model's buffers, with a warning if theirs differed. Random streams are those of the
        worker with the same rank; additional workers keep their own.

        Args:
            state: the result of `state_dict` on this worker; or those of all workers of the earlier run, in any order.
                With residuals of compression, another number of workers needs all of them: worker r of W loads the sum
                over the earlier ranks r, r + W, and so on, so that the sum over all workers stays the same.

        Raises:
            TypeError, ValueError: wrong types or keys, of another model, or other optimizers. Nothing was changed.
            ExecutionError: the step has chosen other factors in its first call; load before that call. Nothing was
                changed.
        """
        self._exclusively(lambda: self._training_state.load_state_dict(state))

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward on all devices, without gradients or updates, in the model's current modes.

        It may be called before the first training step, between steps, and inside ``torch.no_grad()`` or
        ``torch.inference_mode()``. Buffers are written as by a plain forward: statistics in train mode, none in eval
        mode.

        Args:
            *args, **kwargs: as for a training call; with a loss_fn, the target may be left out. It must be named if
                forward could take it.

        Returns:
            The loss of the whole batch; with ``return_outputs``, a pair of the loss and the outputs. Without a loss (no
                ``target`` for the loss_fn, or no loss in the model's result), only the outputs.

        Raises:
            As a training call; nothing has changed then.
        """
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
            return self._exclusively(lambda: self._evaluate(args, kwargs))

    def __repr__(self) -> str:
        devices = ", ".join(device.name for device in self._options.devices)
        workers = self._options.program_workers
        if workers.are_several:
            devices += f" of worker {workers.rank} of {workers.num_workers}"
        num_programs = self._specializer.num_programs
        state = counted(num_programs, "compiled program") if num_programs else "not compiled yet"
        state = "closed" if self._lock.is_closed else state
        state += f", {self._state.accumulated}" if self._state.accumulated.num_calls else ""
        return f"<Step of {type(self._options.model).__name__} on {devices}, backend {self._options.backend.name}: {state}>"

    def __reduce__(self) -> NoReturn:
        why = "it has threads, and it trains one model"
        fix = (
            "copy.deepcopy((model, optimizer)), which are up to date after every step, and compile the copy",
            "mirrorc.save_checkpoint(step, 'run/last')",
        )
        raise problem(TypeError, "MC1602: a compiled step cannot be copied or pickled", why, fix)

    def prepare(self, *args: Any, **kwargs: Any) -> Program:
        """Compiles for a batch like this one, without training on it.

        The program is that of a training call; without an optimizer, that of `gradients`.
        """
        return self._exclusively(lambda: self._training.prepare(args, kwargs, self._purpose_of_step()))

    def _exclusively(self, function: Callable[[], _T]) -> _T:
        return self._lock.run(function, self._end_threads)

    def _foundations(self) -> Foundations | None:
        link = self._coordinator.link
        return Foundations(link, measured_machine()) if link is not None else None

    def _purpose_of_step(self) -> Purpose:
        if not self._options.optimizers.optimizers:
            return Purpose.GRADIENTS
        return Purpose.END_OF_ACCUMULATION if self._state.accumulated.num_calls else Purpose.STEP

    def _train(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], purpose: Callable[[], Purpose]) -> Any:
        """``purpose`` is called when no other call runs."""
        self._coordinator.begin_call()
        return self._result(*self._exclusively(lambda: self._training.run(args, kwargs, purpose())))

    def _result(self, loss: torch.Tensor | None, outputs: Any) -> Any:
        if loss is None or isinstance(self._options.model, FunctionModule):
            return outputs
        return (loss, outputs) if self._options.return_outputs else loss

    def _evaluate(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._modes.look(trains=False)
        self._state.begin_use()
        call, shards = self._signature.split(args, kwargs, trains=False)
        compiled, shards = self._specializer.specialization_for(call, shards, purpose=Purpose.EVALUATION)
        self._lock.check_open()
        compiled.executor.state.prepare_for(compiled.executor.program)
        self._runs.run(compiled, shards, Coordinator(self._options.timeout_seconds))
        return self._result(*compiled.evaluated(call, shards))

    def close(self) -> None:
        """Ends the threads. The model and the optimizer keep their values; the step cannot be called again.

        A call in another thread is stopped unless it is committed; `close` waits for it at most 5 seconds. Accumulated
        gradients are lost, with a warning.
        """
        accumulated = self._state.accumulated
        if accumulated.num_calls and not self._lock.is_closed:
            warn(
                f"MC3206: the step was closed in the middle of an accumulation: {accumulated} made no update",
                "the call that ends an accumulation makes the update",
                (
                    "step(x, y) for the last part, before step.close() or the end of the with block",
                    "step.zero_grad(), to drop what is kept",
                ),
            )
        self._close()

    def _close(self) -> None:
        self._lock.close(self._runs.interrupt, self._end_threads)

    def _end_threads(self) -> None:
        self._habits.close()
        self._state.optimizers.user_steps.forget(self._habits.warn_of_idle_step)
        self._state.close()
        self._coordinator.close()
        self._runs.close()
        self._specializer.release()

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            if error is not None:
                self._coordinator.note_failure(error)
            self._close()


class _ZeroableGradients:
    """Drops accumulated gradients at the user's ``zero_grad`` of an optimizer or model, except during a call."""

    def __init__(
        self, accumulated: AccumulatedGradients, tensors: Mapping[str, torch.Tensor], calls: ExclusiveCalls
    ) -> None:
        self._accumulated, self._tensors, self._calls = accumulated, tensors, calls

    @property
    def has_any(self) -> bool:
        return self._accumulated.num_calls > 0

    def first_of(self, ids: Collection[int]) -> str | None:
        names = self._accumulated.names
        return next((name for name, tensor in self._tensors.items() if id(tensor) in ids and name in names), None)

    def drop(self, ids: Collection[int]) -> None:
        if not self._calls.is_any_running:
            self._accumulated.drop({name for name, tensor in self._tensors.items() if id(tensor) in ids})


def module_calls_of(step: Step, reduction: str) -> ModuleCalls:
    """The calls of `mirrorc.data_parallel`'s module. ``step`` has no loss and no optimizer."""
    return ModuleCalls(
        step._signature,
        step._state,
        step._specializer,
        step._runs,
        step._coordinator,
        step._modes,
        step._exclusively,
        step._options.timeout_seconds,
        reduction,
    )


def join(*steps: Step) -> AbstractContextManager[None]:
    """A context for a loop over several steps that may end earlier on some workers.

    ``with mirrorc.join(d_step, g_step):``, on every worker, is `Step.join` for several steps. A worker whose loop has
    ended takes part in the other workers' training calls of all these steps. This costs an additional round trip before
    each call.

    Args:
        *steps: the steps called in the context, in the same order on all workers. Steps of a process on its own are
            ignored.

    Raises:
        TypeError, ValueError: no steps, an object of another type, a step twice, or steps of different workers.
        ExecutionError, CommunicationError: as `Step.join`; also if workers call different steps.
    """
    others = [step for step in steps if not isinstance(step, Step)]
    if others or not steps:
        received = f"was given a {type(others[0]).__name__}" if others else "was given nothing"
        fix = "mirrorc.join(d_step, g_step), the steps that the block calls"
        raise problem(TypeError, f"MC1603: mirrorc.join {received}", fix=fix)
    if len(set(map(id, steps))) < len(steps):
        fix = "mirrorc.join(d_step, g_step), each once"
        raise problem(ValueError, "MC1603: mirrorc.join was given a step twice", fix=fix)
    joined = [member for step in steps for member in step.joined()]
    if len({id(member.coordinator.team.cluster) for member in joined}) > 1:
        why = "they cannot tell each other whose turn it is"
        fix = "communication=mirrorc.Communication(process_group=group), the same for all of them"
        raise problem(ValueError, "MC1603: mirrorc.join was given steps of different workers", why, fix)
    return until_all_have_left(joined)
