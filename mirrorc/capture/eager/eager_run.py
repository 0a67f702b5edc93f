"""The state of a run of plain PyTorch, its gradients and exchanges with other replicas, and facts common to all runs."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn

from mirrorc.capture.call.traced_outputs import TracedOutputs
from mirrorc.capture.eager.carried_state import CarriedState
from mirrorc.capture.eager.module_copies import ModuleCopy
from mirrorc.capture.eager.rng_streams import ReplicaStream
from mirrorc.capture.eager.run_outputs import RunOutputs
from mirrorc.capture.model.transient_attributes import Attribute
from mirrorc.custom_ops.eager_calls import UsedParameters
from mirrorc.custom_ops.replica_collectives import GATHER, AlikeReplicas, ReplicaExchange
from mirrorc.errors import CaptureError, ExecutionError
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import is_users_file
from mirrorc.user.restore import have_same_bits


class RunExchange:
    """Exchanges values with other replicas, which run while this one waits.

    All replicas must exchange at the same line, or in the backward of the same exchange. Otherwise values would match
    only by chance. ``others.meet_at(subject, kind, value, rows)`` exchanges a value with replicas that pass the same
    subject; without a kind, it returns the value itself.
    """

    def __init__(self, others: Any, stream: ReplicaStream | None, state: CarriedState, model_name: str) -> None:
        self.place, self.count, self.number = others.place, others.count, 0
        self._others, self._stream, self._state, self._model_name = others, stream, state, model_name
        self._subjects: dict[int, str] = {}

    def meet(self, kind: str, value: torch.Tensor, rows: int, origin: int | None) -> torch.Tensor:
        if self._state.is_advanced:
            raise problem(ExecutionError, *advances_state(self._model_name))
        self.number += 1
        if origin is None:
            subject = f"{'mirrorc.all_gather' if kind == GATHER else 'mirrorc.all_reduce'}{_line()}"
        else:
            subject = f"the gradient of exchange {origin}, {self._subjects.get(origin, '')}"
        self._subjects[self.number] = subject
        return self._meet(kind, subject, value, rows)

    def end(self, phase: str) -> None:
        """Checks at the end of forward or backward that all replicas have exchanged equally many values."""
        if not self._state.is_advanced:
            self._meet("", f"the end of its {phase}", torch.empty(0), 0)

    def _meet(self, kind: str, subject: str, value: torch.Tensor, rows: int) -> torch.Tensor:
        with self._stream.paused() if self._stream is not None else contextlib.nullcontext():
            return self._others.meet_at(subject, kind, value, rows)


def _line() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f" at {frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}" if frame is not None else ""


def not_joined(model_name: str) -> CaptureError:
    return problem(
        CaptureError,
        f"MC2503: {model_name} asks for values of all replicas, and did not when it was captured",
        "replicas that ask would wait for those that do not",
        "mirrorc.all_reduce(value) or the like in each call, outside of any if",
    )


def advances_state(model_name: str) -> tuple[str, str, tuple[str, ...]]:
    return (
        f"MC2503: {model_name} asks for values of all replicas as plain PyTorch, and changes Python state",
        "replicas run one after the other there, and none would come to the next exchange",
        ("change the state in your loop, between calls", "keep it in a buffer, self.x.copy_(value)"),
    )


@dataclass(frozen=True)
class ThreadModes:
    autocast: tuple[tuple[str, torch.dtype], ...]
    caches_casts: bool
    device: torch.device

    @classmethod
    def now(cls) -> ThreadModes:
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(autocast, torch.is_autocast_cache_enabled(), torch.get_default_device())

    @contextlib.contextmanager
    def entered(self, *, trains: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(trains))
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.caches_casts))
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            yield


@dataclass
class Run:
    """The state of a run between forward and backward.

    Attributes:
        copy: the modules that ran forward; backward may run them again.
        parameters, buffers, leaves: the inputs. Those that require a gradient have one after backward.
        loss: keeps its autograd graph until backward; an empty tensor without a loss.
        attached: for a module without a loss, the outputs that need a gradient, with their graph.
        tangents: gradients of the attached outputs on which the caller's loss depends; None in a first run, for ones.
        before: value, version and address of each input before forward, by id.
        unreached: in training, indices of `inputs` outside of the loss's graph.
    """

    copy: ModuleCopy
    parameters: list[nn.Parameter]
    buffers: list[torch.Tensor]
    leaves: list[torch.Tensor]
    stream: ReplicaStream | None = None
    before: dict[int, tuple[torch.Tensor, int, int]] = field(default_factory=dict)
    loss: torch.Tensor = field(init=False)
    unreached: Set[int] = frozenset()
    outputs: RunOutputs | None = None
    exchange: ReplicaExchange = field(default_factory=AlikeReplicas)
    attached: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tangents: Mapping[str, torch.Tensor] | None = None

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that may have gradients, in the order of `take_gradient`."""
        return [*self.parameters, *self.leaves]

    def note_inputs(self, values: Sequence[torch.Tensor]) -> None:
        inputs = zip((*self.parameters, *self.buffers, *self.leaves), values, strict=True)
        self.before = {id(tensor): (value, tensor._version, tensor.data_ptr()) for tensor, value in inputs}

    def assign(self, place: int, value: torch.Tensor) -> None:
        """Makes a copy of ``value`` the buffer at ``place``. Backward may need the former buffer."""
        former = self.before[id(self.buffers[place])][0]
        self.buffers[place] = value.clone()
        self.before[id(self.buffers[place])] = (former, -1, -1)

    def written(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Includes writes of other values through ``.data``."""
        return [place for place, tensor in enumerate(tensors) if self._is_written(tensor)]

    def _is_written(self, tensor: torch.Tensor) -> bool:
        value, version, _ = self.before[id(tensor)]
        return tensor._version != version or (self._is_replaced(tensor) and not have_same_bits(tensor, value))

    def _is_replaced(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() != self.before[id(tensor)][2]

    def replaced(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Tensors with an assigned ``.data``, even of equal values, but not by a recurrent layer of torch."""
        layers = [module for module in self.copy.root.modules() if isinstance(module, nn.RNNBase)]
        moved = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
        return [i for i, tensor in enumerate(tensors) if id(tensor) not in moved and self._is_replaced(tensor)]


@dataclass(frozen=True)
class Recorded:
    """Facts from first runs that the graph assumes of all runs. Variables are indices.

    Attributes:
        loss_dtype: None for an evaluation without a loss.
        gradients: the trainable parameters in the order of backward, then the arguments that get a gradient.
        late: parameters whose gradient has several parts, or comes from outside of the loss's graph.
        differentiable: for a module without a loss, the outputs that may need a gradient.
        alike: buffers with one value in all runs of a step.
    """

    loss_dtype: torch.dtype | None
    gradients: tuple[int, ...]
    written: tuple[int, ...]
    draws: bool
    outputs: TracedOutputs | None = None
    late: frozenset[int] = frozenset()
    transient: frozenset[Attribute] = frozenset()
    alike: frozenset[int] = frozenset()
    exchanges: bool = False
    differentiable: tuple[str, ...] = ()


def parameter_of_run(original: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """Keeps the attributes of the user's parameter."""
    parameter = nn.Parameter(value.detach(), original.requires_grad)
    if original.__dict__:
        parameter.__dict__.update(original.__dict__)
    return parameter


def note_reach(run: Run) -> list[torch.Tensor]:
    """Sets ``run.unreached``. Returns the graph's leaves that are not inputs of the run."""
    known = {id(tensor) for tensor in (*run.parameters, *run.buffers, *run.leaves)}
    leaves = _leaves_of([*run.attached.values()] or [run.loss])
    reached = set(map(id, leaves))
    run.unreached = frozenset(place for place, tensor in enumerate(run.inputs) if id(tensor) not in reached)
    return [leaf for leaf in leaves if id(leaf) not in known]


def _leaves_of(roots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    waiting: list[Any] = [root.grad_fn for root in roots]
    leaves, seen = [root for root in roots if root.is_leaf and root.requires_grad], set(waiting)
    while waiting:
        node: Any = waiting.pop()
        following = node.next_functions if node is not None else ()
        if not following and hasattr(node, "variable"):
            leaves.append(node.variable)
        for source, _ in following:
            if source is not None and source not in seen:
                seen.add(source)
                waiting.append(source)
    return leaves


class RunGradients:
    """Runs one backward, and returns each gradient when it is complete.

    A gradient is complete when torch calls its parameter's post-accumulate hook. The gradient of a ``late`` parameter
    is complete at the end of backward, because it may come in parts or from a nested backward.

    Attributes:
        arrived: indices of parameters and arguments in the order of their gradients; repeated for each addition.
    """

    def __init__(
        self,
        run: Run,
        backward: Callable[[], None],
        late: Set[int],
        model_name: str,
        carried: CarriedState,
        used: UsedParameters,
    ) -> None:
        self.of, self._backward, self._late, self._model_name = run, backward, late, model_name
        self._carried, self.used = carried, used
        self.arrived: list[int] = []
        self.has_ended = False
        self._there, self._taken, self._has_begun = set(run.unreached) - late, set[int](), False
        self._on_gradient: Callable[[], object] = lambda: None
        self._thread = 0

    @property
    def may_wait(self) -> bool:
        """False if other replicas wait for this backward, as it draws random numbers, exchanges values or has state."""
        others_wait = self.of.stream is not None or isinstance(self.of.exchange, RunExchange)
        return not (others_wait or self._carried.is_advanced)

    def has(self, place: int) -> bool:
        """True if backward has begun and the gradient is final, or will not come."""
        return self.has_ended or (self._has_begun and place in self._there)

    def run(self, on_gradient: Callable[[], object] = lambda: None) -> None:
        assert not self._has_begun, "a run has one backward"
        self._has_begun, self._on_gradient, self._thread = True, on_gradient, threading.get_ident()
        hooks = [
            tensor.register_post_accumulate_grad_hook(functools.partial(self._note, place))
            for place, tensor in enumerate(self.of.inputs)
            if tensor.requires_grad
        ]
        try:
            self._backward()
        finally:
            self._on_gradient = lambda: None
            for hook in hooks:  # the hooks refer to this object
                hook.remove()
        self.has_ended = True

    def _note(self, place: int, _: torch.Tensor) -> None:
        """A post-accumulate hook. It calls on_gradient only on a CPU: for a GPU, torch runs hooks in another thread."""
        if place in self._taken:
            raise problem(
                ExecutionError,
                f"MC2602: a gradient of shape {list(self.input_at(place).shape)} changed after it had been sent",
                f"something in the backward of {self._model_name} calls backward() itself, and did not in the first call",
                "return the gradients from your autograd.Function instead of calling .backward() in it",
            )
        self.arrived.append(place)
        if place not in self._late:
            self._there.add(place)
        if threading.get_ident() == self._thread:
            self._on_gradient()

    def input_at(self, place: int) -> torch.Tensor:
        return self.of.inputs[place]

    def take(self, place: int) -> torch.Tensor | None:
        """Removes a gradient; None if the parameter or argument is unused. Runs backward if it has not begun."""
        if not self._has_begun:
            self.run()
        assert self.has(place), "a gradient is taken when it is there"
        tensor = self.input_at(place)
        gradient, tensor.grad = tensor.grad, None
        self._taken.add(place)
        return gradient
