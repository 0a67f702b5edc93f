"""Forward and backward of a module in a loop that computes its own loss and updates."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mirrorc.calls.forward_run import ForwardRun, outputs_in_autograd
from mirrorc.calls.program_runs import ProgramRuns
from mirrorc.capture.call.call_arguments import Call, Leaf
from mirrorc.capture.call.shards import Shards
from mirrorc.capture.call.signature import Signature
from mirrorc.compilation.call_kind import Purpose
from mirrorc.compilation.program_cache import Backward, Specialization
from mirrorc.compilation.specializer import Specializer
from mirrorc.coordination.coordinator import Coordinator, Retry
from mirrorc.custom_ops.eager_calls import UsedParameters
from mirrorc.errors import CommunicationError, ExecutionError
from mirrorc.ir.program import Program
from mirrorc.messages.problem import message, problem
from mirrorc.messages.source_lines import users_stack_level
from mirrorc.runtime.state.gradients.accumulated_gradients import Examples
from mirrorc.runtime.state.module_states import BackwardState
from mirrorc.runtime.state.step_state import StepState
from mirrorc.torch_internals import backward_keeps_graph, current_backward, runs_transform
from mirrorc.user.loop_warnings import CallersModes


class ModuleCalls:
    """Forwards and backwards of a module.

    Args:
        exclusively: runs a function while no other call over the same parameters runs.
    """

    def __init__(
        self,
        signature: Signature,
        state: StepState,
        specializer: Specializer,
        runs: ProgramRuns,
        coordinator: Coordinator,
        modes: CallersModes,
        exclusively: Callable[[Callable[[], Any]], Any],
        timeout_seconds: float,
        reduction: str,
    ) -> None:
        self._signature, self._state, self._specializer, self._runs = signature, state, specializer, runs
        self._coordinator, self._modes, self._exclusively = coordinator, modes, exclusively
        self._reduction = reduction
        self._alone = Coordinator(timeout_seconds)  # for forward, which workers run alone
        self._have_met = self._have_chosen = coordinator.team is None
        self._meets = False  # whether a forward has exchanged values with other workers
        self._last_share = -1, 1.0  # the number of the last backward, and the weight of this worker in it
        self._warns_of_shares = True
        self.programs: tuple[Program, ...] = ()

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The outputs of the whole batch. Their backward in autograd runs the program of backward."""
        if runs_transform():
            raise problem(
                ExecutionError,
                "MC3210: a compiled module was called within torch.func or forward-mode differentiation",
                "its program knows no such transform",
                "model.module(x), the plain model",
            )
        call = self._signature.call_of(args, kwargs, trains=False)
        needs_gradient = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        asked = frozenset(i for i, leaf in enumerate(call.leaves) if _requires_gradient(leaf))
        values = dataclasses.replace(
            call,
            leaves=tuple(_detached(leaf) if i in asked else leaf for i, leaf in enumerate(call.leaves)),
            differentiated=asked if needs_gradient else frozenset(),
        )
        parameters = (t for t in self._state.store.tensors.values() if isinstance(t, torch.nn.Parameter))
        trains = needs_gradient and (bool(asked) or any(parameter.requires_grad for parameter in parameters))
        self._modes.look(trains=trains)
        with torch.inference_mode(False), torch.no_grad():
            run = self._exclusively(lambda: self._run(values, trains=trains))
        assert run.compiled.outputs is not None, "a module has outputs"
        gathered, shards = run.outputs, run.shards
        if run.backward is not None and run.differentiable:
            gathered = {**gathered, **self._in_autograd(run, run.backward, call)}
        return run.compiled.outputs.of_step(gathered, None, call, shards)

    def _in_autograd(self, run: ForwardRun, backward: Backward, call: Call) -> dict[str, Any]:
        variables, cut = self._state.store.tensors, backward.cut
        inputs = [call.leaves[i].tensor for i in cut.gradients_of_leaves]
        inputs += [variables[name] for name in backward.gradients]
        read: list[torch.Tensor] = []
        if not backward.runs_plain:  # otherwise each run's graph guards the tensors that it reads
            read = [variables[name] for name in cut.read_variables if name in variables]
            read += [*backward.constants, *(tensor for i in cut.read_leaves for tensor in _tensors_of(call.leaves[i]))]
        return outputs_in_autograd(run, self._backward, read, [tensor for tensor in inputs if tensor is not None])

    def _run(self, call: Call, *, trains: bool) -> ForwardRun:
        self._state.begin_use()
        shards = self._signature.shards_of(call)
        purpose = Purpose.FORWARD if trains else Purpose.EVALUATION
        compiled, shards = self._specialization_for(call, shards, purpose)
        meets = compiled.executor.meets_workers
        self._meets |= meets
        if compiled.backward is not None and not meets and (not self._have_met or self._is_to_choose(compiled)):
            compiled, shards = self._take_over_values(compiled, call, shards)
        coordinator = self._coordinator if meets else self._alone
        with coordinator.call():
            if meets:
                compiled, shards = self._meet_in_forward(compiled, call, shards, purpose)
            executor = compiled.executor
            executor.state.prepare_for(executor.program)
            self._runs.run(compiled, shards, coordinator)
        outputs = self._outputs_of(compiled, shards)
        if len(shards.num_examples) == 1:
            outputs = {name: value[0] if isinstance(value, list) else value for name, value in outputs.items()}
        if compiled.backward is not None:
            self.programs = (executor.program, compiled.backward.executor.program)
        differentiable = frozenset(compiled.backward.cut.tangents) if compiled.backward is not None else frozenset()
        if compiled.backward is not None and compiled.backward.runs_plain:
            differentiable = frozenset(executor.used.last.outputs)
        kept = executor.outputs.take_kept()
        return ForwardRun(call, compiled, shards, outputs, kept, self._runs.draws, differentiable)

    def _specialization_for(self, call: Call, shards: Shards, purpose: Purpose) -> tuple[Specialization, Shards]:
        """If it cannot be compiled, and other workers wait for this one in the same forward, they are told."""
        try:
            return self._specializer.specialization_for(call, shards, purpose=purpose)
        except Exception:
            if purpose is Purpose.FORWARD and (self._meets or not (self._have_met and self._have_chosen)):
                with self._coordinator.call():
                    raise
            raise

    def _outputs_of(self, compiled: Specialization, shards: Shards) -> dict[str, Any]:
        outputs = compiled.executor.outputs.take(shards.num_examples)
        if any(shards.num_examples) or compiled.outputs is None:
            return outputs
        return compiled.outputs.of_no_examples(compiled.executor.program.devices[0].torch_device)

    def _is_to_choose(self, compiled: Specialization) -> bool:
        """True in the first forward whose backward exchanges gradients: workers then choose how they do this."""
        return not self._have_chosen and self._specializer.choices.are_open_for(compiled.executors[-1].program)

    def _take_over_values(self, compiled: Specialization, call: Call, shards: Shards) -> tuple[Specialization, Shards]:
        """In the first call, all receive the chief's values."""
        with self._coordinator.call():
            compiled, shards = self._chosen_by_all(compiled, call, shards)
            assert compiled.backward is not None, "another choice changes nothing but the passes"
            executor = compiled.backward.executor
            while self._exchange_header(compiled, call, shards, of_backward=True) is not None:
                self._state.begin_use()
            executor.state.prepare_for(executor.program)
            self._coordinator.end_backward(executor.program)
            self._state.accept()
        self._have_met = True
        return compiled, shards

    def _chosen_by_all(self, compiled: Specialization, call: Call, shards: Shards) -> tuple[Specialization, Shards]:
        if not self._is_to_choose(compiled):
            return compiled, shards
        with self._specializer.choices.in_call():
            chosen = self._specializer.specialization_for(call, shards, purpose=Purpose.FORWARD)
        self._have_chosen = True
        return chosen

    def _meet_in_forward(
        self, compiled: Specialization, call: Call, shards: Shards, purpose: Purpose
    ) -> tuple[Specialization, Shards]:
        compiled, shards = self._chosen_by_all(compiled, call, shards)
        while (retry := self._exchange_header(compiled, call, shards, of_backward=False)) is not None:
            if retry.rows_elsewhere is not None:
                self._specializer.note_rows(call, shards, purpose, retry.rows_elsewhere)
            elif self._have_met:
                raise _different_parameters()
            else:
                self._state.begin_use()
                self._state.accept()
            compiled, shards = self._specializer.specialization_for(call, shards, purpose=purpose)
        self._have_met = True
        return compiled, shards

    def _exchange_header(
        self, compiled: Specialization, call: Call, shards: Shards, *, of_backward: bool
    ) -> Retry | None:
        self._coordinator.note_call(call)
        executor = compiled.executors[-1 if of_backward else 0]
        later = compiled.backward.executor if compiled.backward is not None and not of_backward else None
        rows = compiled.row_counts(shards) if of_backward else ()  # forward sends no factors
        return self._coordinator.exchange_header(executor, shards.num_examples, rows, backward=later)

    def _backward(self, run: ForwardRun, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        def run_with_others() -> list[torch.Tensor | None]:
            with self._coordinator.call():
                return self._run_backward(run, tangents)

        with torch.no_grad():
            gradients: list[torch.Tensor | None] = self._exclusively(run_with_others)
            return gradients

    def _run_backward(self, run: ForwardRun, tangents: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        backward, shards = run.backward, run.shards
        assert backward is not None and run.kept is not None
        self._state.begin_use()
        each = zip(shards.tensors, run.tangents_of_replicas(tangents), run.kept, strict=True)
        tensors = [[*shard, *parts, *kept] for shard, parts, kept in each]
        executor = backward.executor
        if self._exchange_header(run.compiled, run.call, shards, of_backward=True) is not None:
            raise _different_parameters()
        outputs = run.by_output(tangents)
        absent = frozenset(name for name, parts in outputs.items() if all(part is None for part in parts))
        reached = self._coordinator.union([name not in absent for name in backward.cut.tangents])
        if not backward_keeps_graph():
            run.kept = None  # the program frees the values one by one
        executor.state.prepare_for(executor.program)
        sizes = run.compiled.sizes_of(shards)
        examples = self._coordinator.examples(sum(shards.num_examples))
        weight = self._weight(examples)
        self._look_at_share(weight)
        weights = [weight if n else 0.0 for n in shards.num_examples]
        executor.used.next = UsedParameters(absent, keeps_graph=backward_keeps_graph())
        self._runs.run_backward(executor, tensors, weights, examples, run.draws, sizes)
        self._coordinator.end_backward(executor.program)
        gradients: dict[str, Any] = executor.outputs.take(shards.num_examples)
        gradients |= executor.state.take() if isinstance(executor.state, BackwardState) else {}
        if backward.runs_plain:
            of_leaves = backward.cut.gradients_of_leaves
            unused = {name for leaf, name in of_leaves.items() if leaf not in executor.used.last.leaves}
            gradients = {name: value for name, value in gradients.items() if name not in unused}
        if not any(shards.num_examples):
            leaves = [(name, run.call.leaves[leaf].tensor) for leaf, name in backward.cut.gradients_of_leaves.items()]
            gradients |= {name: torch.zeros_like(tensor) for name, tensor in leaves if tensor is not None}
        names = (*backward.cut.gradients_of_leaves.values(), *backward.gradients)
        is_reached = {name: any(reached[place] for place in backward.cut.reached[name]) for name in names}
        return [gradients.get(name) if is_reached[name] else None for name in names]

    def _weight(self, examples: Examples) -> float:
        team = self._coordinator.team
        if team is None or self._reduction == "sum":
            return 1.0
        return examples.local / examples.of_all if self._reduction == "examples" else 1 / team.cluster.num_workers

    def _look_at_share(self, weight: float) -> None:
        backward, share = self._last_share
        self._last_share = current_backward(), weight
        if self._last_share[0] == backward and share != weight and self._warns_of_shares:
            self._warns_of_shares = False
            text = message(
                "MC3101: this worker had different shares of the examples in two forwards of one loss",
                "each forward is weighted by its own share, which is not exact for a mean over the examples of both",
                (
                    "batches of one size for all forwards of a loss, on each worker",
                    "mirrorc.data_parallel(..., reduction='sum'), and a loss divided by the number of examples of all workers",
                ),
            )
            warnings.warn(text, stacklevel=users_stack_level())


def _different_parameters() -> CommunicationError:
    return problem(
        CommunicationError,
        "MC6301: parameters have become different on the workers since their last backward",
        "each worker must make the same updates",
        "optimizer.step() on all workers, with the same hyperparameters and parameters",
        now="the chief's values were taken over, and nothing was computed",
    )


def _requires_gradient(leaf: Leaf) -> bool:
    return leaf.tensor is not None and not leaf.column and leaf.tensor.requires_grad


def _detached(leaf: Leaf) -> Leaf:
    assert leaf.tensor is not None
    return dataclasses.replace(leaf, tensor=leaf.tensor.detach())


def _tensors_of(leaf: Leaf) -> Sequence[torch.Tensor]:
    return leaf.column or (leaf.per_replica if leaf.tensor is None else (leaf.tensor,))
