"""A training call that runs as plain PyTorch on each replica."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from mirrorc.capture.call.traced_loss import TracedLoss
from mirrorc.capture.call.traced_outputs import UnreadableOutputError, noted_marks
from mirrorc.capture.diagnostics.capture_errors import refuse_complex
from mirrorc.capture.diagnostics.python_effects import cached_parametrizations, is_like, other_buffer
from mirrorc.capture.diagnostics.untrained_tensors import outside_of_module
from mirrorc.capture.diagnostics.written_buffers import are_alike
from mirrorc.capture.eager.carried_state import CarriedState
from mirrorc.capture.eager.eager_run import (
    Recorded,
    Run,
    RunExchange,
    RunGradients,
    ThreadModes,
    not_joined,
    note_reach,
    parameter_of_run,
)
from mirrorc.capture.eager.module_copies import ModuleCopy
from mirrorc.capture.eager.rng_streams import ReplicaStream, generator_states
from mirrorc.capture.eager.run_outputs import difference, read_run
from mirrorc.capture.model.transient_attributes import CARRIED, AssignedAttributeError, Attribute
from mirrorc.custom_ops.eager_calls import RunInputs, UsedParameters
from mirrorc.custom_ops.registration import RunTokens
from mirrorc.custom_ops.replica_collectives import ReplicaExchange, current_exchange, exchanging, refused_exchange
from mirrorc.errors import CaptureError, ExecutionError, MirrorcError
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import caches_parametrizations, parametrization_cache
from mirrorc.user.restore import have_same_bits


class OpaqueCall:
    """Runs forward and backward of a training call for several replicas at once, each on a `ModuleCopy`."""

    recorded: Recorded

    def __init__(self, call: TracedLoss) -> None:
        self.parameters: Mapping[str, nn.Parameter] = dict(call.named_parameters())
        self.buffers: Mapping[str, torch.Tensor] = dict(call.named_buffers())
        self._originals = [*self.parameters.values()]
        self.call, self.model_name, self._modes = call, type(call.model).__name__, ThreadModes.now()
        self._plain = call.plain
        self._is_parametrized = any(map(is_parametrized, call.modules()))
        self._free: list[ModuleCopy] = []  # of finished runs
        self._runs: RunTokens[Run | RunGradients] = RunTokens()  # with gradients still to return
        self._used = UsedParameters()
        self.state: CarriedState = call.carried or CarriedState(self.model_name)

    # What the operators run

    def begin_step(self, used: UsedParameters) -> None:
        self._used = used

    def forward(self, inputs: RunInputs) -> list[torch.Tensor]:
        """Raises `ExecutionError` if the run differs from the first runs in its writes, draws or results."""
        run = self._checked_run(inputs)
        token = self._runs.add(run)
        self._used.note_outputs(run.attached)
        loss = run.loss.detach().reshape(()).clone() if not self.call.takes_tangents else self._no_loss(run)
        return [loss, token, *self._written_and_outputs(run)]

    def _no_loss(self, run: Run) -> torch.Tensor:
        return run.parameters[0].new_zeros((), dtype=self.recorded.loss_dtype)

    def evaluation(self, inputs: RunInputs) -> list[torch.Tensor]:
        run = self._checked_run(inputs)
        self.release(run)
        loss = [run.loss.detach().reshape(()).clone()] if self.recorded.loss_dtype is not None else []
        return [*loss, *self._written_and_outputs(run)]

    def _checked_run(self, inputs: RunInputs) -> Run:
        seed, leaves, parameters, buffers = inputs
        stream = ReplicaStream(int(seed), parameters[0].device) if seed is not None else None
        try:
            with self.state.advanced():
                run = self.run_forward(stream, leaves, parameters, buffers, self.recorded.transient)
        except UnreadableOutputError as error:
            raise ExecutionError(str(error)) from None
        self._check_loss(run)
        if self.call.trains:
            self.check_reach(run, ExecutionError)
        self._check_writes(run)
        self._check_alike(run)
        self._check_outputs(run)
        self._end(run, "forward")
        return run

    def _written_and_outputs(self, run: Run) -> list[torch.Tensor]:
        outputs = run.outputs.tensors.values() if run.outputs is not None else ()
        return [
            *(run.buffers[i] for i in self.recorded.written),
            *(tensor.to(run.parameters[0].device) for tensor in outputs),
        ]

    def backward(
        self, token: torch.Tensor, tangent: torch.Tensor | None, tangents: Sequence[torch.Tensor]
    ) -> RunGradients:
        record = self._runs[token]
        if isinstance(record, RunGradients) and record.used is self._used:
            return record
        run = record.of if isinstance(record, RunGradients) else record
        each = zip(self.recorded.differentiable, tangents, strict=True)
        run.tangents = {name: value for name, value in each if name not in self._used.absent_outputs}
        gradients = self._runs[token] = self.gradients_of(run, tangent, self.recorded.late)
        return gradients

    def gradient(
        self, token: torch.Tensor, tangent: torch.Tensor | None, place: int, tangents: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Zeros if this replica has not used the parameter or argument."""
        gradients = self.backward(token, tangent, tangents)
        gradient = gradients.take(place)
        if place >= len(self._originals):
            if gradient is not None:
                self._used.note_leaf(place - len(self._originals))
            return _as_typed(gradient, gradients.input_at(place))
        original = self._originals[place]
        if gradient is not None:
            self._used.note(original)
        return _as_typed(gradient, original)

    # Runs

    def run_forward(
        self,
        stream: ReplicaStream | None,
        leaves: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        transient: Set[Attribute] = frozenset(),
        *,
        is_first: bool = False,
    ) -> Run:
        """Runs forward with copies of the buffers."""
        try:
            copy = self._free.pop()
        except IndexError:
            copy = ModuleCopy(self.call)
        run = Run(
            copy,
            [
                parameter_of_run(parameter, value)
                for parameter, value in zip(self.parameters.values(), parameters, strict=True)
            ],
            [value.detach().clone() for value in buffers],
            [
                value.detach().requires_grad_(self.call.trains and place in self.call.differentiated)
                for place, value in enumerate(leaves)
            ],
            stream,
        )
        run.note_inputs((*parameters, *buffers, *leaves))
        originals = (*self.parameters.values(), *self.buffers.values())
        tensors = dict(zip(map(id, originals), (*run.parameters, *run.buffers), strict=True))
        carried = CARRIED.among(copy.originals)
        transient = transient - carried
        copy.load(tensors, transient, plain=self._plain)
        if not is_first:
            run.exchange = self._exchange_of(run)
        modes, meets = self._modes.entered(trains=self.call.trains), exchanging(run.exchange)
        alone = copy.alone(carried) if is_first else contextlib.nullcontext()
        caching = self._refused_caches(CaptureError if is_first else ExecutionError)
        with caching, modes, self._drawing(run, "forward"), meets, alone, noted_marks() as marked:
            result = copy.run(*run.leaves)
        copy.hand_over(carried)
        run.loss, outputs = result if self.call.keeps_outputs else (result, None)
        if self.call.keeps_outputs:
            parameter = dict(zip(map(id, (*run.parameters, *run.buffers)), originals, strict=True))
            run.outputs, values = read_run(outputs, run.loss, run.leaves, parameter, marked)
            if self.call.takes_tangents:
                run.attached = {name: value for name, value in values.items() if value.requires_grad}
                refuse_complex(run.attached, self.model_name)
        self._take_assigned_buffers(run, is_first=is_first)
        replaced = copy.replaced()
        assigned = [attribute for attribute in copy.assigned() if attribute not in carried]
        if replaced is not None or assigned:
            raise AssignedAttributeError.of(replaced or assigned[0][1], () if replaced is not None else assigned)
        return run

    @contextlib.contextmanager
    def _refused_caches(self, kind: type[Exception]) -> Iterator[None]:
        cache = parametrization_cache()
        if self._is_parametrized and caches_parametrizations():
            raise kind(cached_parametrizations(self.model_name))
        yield
        if self._is_parametrized and cache is not parametrization_cache():
            raise kind(cached_parametrizations(self.model_name))

    def _take_assigned_buffers(self, run: Run, *, is_first: bool) -> None:
        places = {id(buffer): place for place, buffer in enumerate(run.buffers)}
        for buffer, value in run.copy.take_assigned_buffers():
            place = places[id(buffer)]
            if not is_like(value, buffer):
                kind, name = CaptureError if is_first else ExecutionError, _short([*self.buffers][place])
                raise other_buffer(kind, self.model_name, name, value, buffer)
            run.assign(place, value)

    def gradients_of(self, run: Run, tangent: torch.Tensor | None, late: Set[int] = frozenset()) -> RunGradients:
        tangent = tangent if tangent is not None else torch.ones(())
        backward = functools.partial(self._run_backward, run, tangent, keeps_graph=self._used.keeps_graph)
        return RunGradients(run, backward, late, self.model_name, self.state, self._used)

    def _run_backward(self, run: Run, tangent: torch.Tensor, *, keeps_graph: bool) -> None:
        trainable = [tensor for tensor in run.inputs if tensor.requires_grad]
        for tensor in trainable:
            if tensor.grad is not None:  # from a backward() within forward, so the loss weight is missing
                tensor.grad.mul_(tangent.to(tensor.grad))
        meets = exchanging(run.exchange)
        with torch.enable_grad(), self.state.alone(), self._drawing(run, "backward"), meets:
            if self.call.takes_tangents:
                names = [name for name in run.attached if run.tangents is None or name in run.tangents]
                _backward_of(run, names, tangent, trainable, keeps_graph=keeps_graph)
            else:
                run.loss.backward(tangent.reshape(run.loss.shape), inputs=trainable)
        self._end(run, "backward")
        if not keeps_graph:
            del run.loss, run.attached
            self.release(run)

    def _exchange_of(self, run: Run) -> ReplicaExchange:
        if not self.recorded.exchanges:
            return refused_exchange(not_joined(self.model_name))
        return RunExchange(current_exchange(), run.stream, self.state, self.model_name)

    def _end(self, run: Run, phase: str) -> None:
        if isinstance(run.exchange, RunExchange):
            run.exchange.end(phase)

    def release(self, run: Run) -> None:
        run.copy.unload()
        self._free.append(run.copy)

    @contextlib.contextmanager
    def _drawing(self, run: Run, phase: str) -> Iterator[None]:
        if run.stream is not None:
            with run.stream.drawn_from():
                yield
            return
        devices = [torch.device("cpu"), *{p.device for p in run.parameters if p.device.type == "cuda"}]
        before = generator_states(devices)
        yield
        if not all(map(torch.equal, before, generator_states(devices))):
            raise self._changed(
                f"{phase} of {{}} drew random numbers of torch, and drew none when it was captured",
                "replicas would draw in any order; another thread that draws meanwhile looks the same",
                "have each call draw, torch.rand(())",
            )

    def _changed(self, what: str, why: str, fix: str | Sequence[str], now: str = "") -> ExecutionError:
        return problem(ExecutionError, f"MC2601: {what.format(self.model_name)}", why, fix, now=now)

    def _check_loss(self, run: Run) -> None:
        loss, dtype, trains = run.loss, self.recorded.loss_dtype, self.call.trains
        if self.call.takes_tangents or (dtype is None and not loss.numel()):
            return
        if loss.numel() != 1 or loss.dtype is not dtype or (trains and not loss.requires_grad):
            lacking = ", without a gradient," if trains and not loss.requires_grad else ""
            gradient = " with a gradient" if trains else ""
            wanted = f"one number of {dtype}{gradient}" if dtype is not None else "not there"
            raise self._changed(
                f"the loss of {{}} is {loss.dtype} of shape {list(loss.shape)}{lacking} in this call",
                f"it was {wanted} when it was captured",
                "return a loss of one element, one dtype and with a gradient in each call, or in none",
            )

    def check_reach(self, run: Run, kind: type[MirrorcError]) -> list[torch.Tensor]:
        """Returns the leaves of the loss's graph that are not inputs of the run. Refuses parameters of the user."""
        besides, names = note_reach(run), {id(original): name for name, original in self.parameters.items()}
        name = next((names[id(leaf)] for leaf in besides if id(leaf) in names), None)
        if name is not None:
            raise problem(
                kind,
                f"MC2306: forward or loss of {self.model_name} uses the parameter {_short(name)!r} "
                "through a global, a closure or an object",
                "each replica has modules of its own, and that is not the replica's parameter",
                ("use it through self", "make the loss a module that holds the model as a submodule"),
            )
        if besides and self.call.takes_tangents:
            raise kind(outside_of_module(self.model_name, f"a tensor of shape {list(besides[0].shape)}"))
        return besides

    def _check_outputs(self, run: Run) -> None:
        if run.outputs is None or self.recorded.outputs is None:
            return
        name = difference(run.outputs.record, self.recorded.outputs)
        if name:
            raise self._changed(
                f"{{}} or its loss returns something else as {name!r} than when it was captured",
                "the structure, the shape or dtype of a tensor, or a value that is no tensor, has changed",
                (
                    "return tensors of the same shapes each time, and a number that changes as a tensor",
                    "leave return_outputs= out",
                ),
            )

    def _check_writes(self, run: Run) -> None:
        for kind, tensors, variables in (("parameter", run.parameters, self.parameters), ("argument", run.leaves, ())):
            for place in run.written(tensors):
                name = f" {_short([*variables][place])!r}" if variables else ""
                stays = place not in run.replaced(tensors)
                raise self._changed(
                    f"forward of {{}} wrote its {kind}{name} in place, and did not when it was captured",
                    "",
                    "write value.clone(), and load a checkpoint of the model"
                    if stays
                    else "write it in your loop, between calls",
                    "it stays written" if stays else "",
                )
        names, written = [*self.buffers], run.written(run.buffers)
        for place, buffer in enumerate(run.buffers):
            # a write through .data, or by a normalization, has no version
            if place not in self.recorded.written and not have_same_bits(buffer, run.before[id(buffer)][0]):
                written.append(place)
        for place in written:
            if place not in self.recorded.written:
                raise self._changed(
                    f"forward of {{}} wrote the buffer {_short(names[place])!r}, and did not when it was captured",
                    "each call must write the same buffers",
                    f"self.{_short(names[place])}.copy_(self.{_short(names[place])}), in calls that leave it as it is",
                )
            if run.buffers[place].requires_grad:
                raise problem(
                    ExecutionError,
                    f"MC2304: forward of {self.model_name} wrote a value that requires a gradient to the "
                    f"buffer {_short(names[place])!r}",
                    fix=f"self.{_short(names[place])}.copy_(value.detach())",
                )

    def _check_alike(self, run: Run) -> None:
        names, places = [*self.buffers], self.recorded.alike if self.call.trains else ()
        for name, value in ((names[place], run.buffers[place]) for place in places):
            if not are_alike(value, self._used.first_value(self.buffers[name], value)):
                raise problem(
                    ExecutionError,
                    f"MC2505: the spectral norm {_short(name)!r} was computed more often on one shard than on another",
                    "each time updates its vectors, which replicas have in common",
                    f"call its module once in each forward of {self.model_name}, with all examples at once",
                )


def _short(name: str) -> str:
    return name.removeprefix("model.")


def _backward_of(
    run: Run, names: Sequence[str], weight: torch.Tensor, inputs: Sequence[torch.Tensor], *, keeps_graph: bool
) -> None:
    """Backward from outputs. It begins with their tangents times the weight of the caller's loss."""
    roots = [run.attached[name] for name in names]
    tangents = list(map(torch.ones_like, roots)) if run.tangents is None else [run.tangents[name] for name in names]
    if roots:
        weighted = [tangent * weight.to(tangent) for tangent in tangents]
        torch.autograd.backward(roots, weighted, retain_graph=keeps_graph, inputs=inputs)


def _as_typed(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if gradient is not None and gradient.layout is torch.strided and gradient.stride() == like.stride():
        return gradient
    laid = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return laid.copy_(gradient) if gradient is not None else laid.zero_()
