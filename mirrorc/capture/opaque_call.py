"""A training call whose forward and backward replicas run as plain PyTorch."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from mirrorc.capture.module_copies import ModuleCopy
from mirrorc.capture.replica_streams import ReplicaStream, generator_states
from mirrorc.capture.training_call import TrainingCall
from mirrorc.custom_ops.opaque_calls import UsedParameters
from mirrorc.custom_ops.replica_values import nobody_answers
from mirrorc.errors import CaptureError, ExecutionError


@dataclass(frozen=True)
class ThreadModes:
    """What torch keeps for each thread by itself, as it is in the thread that captures."""

    autocast: tuple[tuple[str, torch.dtype], ...]
    caches_casts: bool
    device: torch.device

    @classmethod
    def now(cls) -> ThreadModes:
        """Those of this thread."""
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(autocast, torch.is_autocast_cache_enabled(), torch.get_default_device())

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """A block in which this thread has them, and gradients."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=self.caches_casts))
            if self.device != torch.get_default_device():
                stack.enter_context(self.device)
            yield


@dataclass
class Run:
    """A forward that has run, and whose backward has not.

    Attributes:
        copy: the modules that have run, which backward may run again.
        parameters, buffers, leaves: the tensors that forward was given, with gradients after backward.
        versions: of these buffers and parameters, before forward.
        stream: the random numbers that it draws from; None if it draws none.
        loss: with its graph, until backward.
    """

    copy: ModuleCopy
    parameters: list[nn.Parameter]
    buffers: list[torch.Tensor]
    leaves: list[torch.Tensor]
    stream: ReplicaStream | None = None
    versions: list[int] = field(default_factory=list)
    loss: torch.Tensor = field(init=False)

    def written(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The places of those of its tensors that were written in place."""
        known = {id(t): v for t, v in zip((*self.parameters, *self.buffers, *self.leaves), self.versions, strict=True)}
        return [place for place, tensor in enumerate(tensors) if tensor._version != known[id(tensor)]]


@dataclass(frozen=True)
class Recorded:
    """What first runs have found, which the graph of a step says of all others.

    Attributes:
        loss_dtype: of the loss, a single number.
        gradients: the places of the parameters that get a gradient, in the order in which backward gives them.
        written: the places of the buffers that forward writes.
        draws: whether random numbers are drawn.
    """

    loss_dtype: torch.dtype
    gradients: tuple[int, ...]
    written: tuple[int, ...]
    draws: bool


class OpaqueCall:
    """Runs forward and backward of a training call, for several replicas at the same time.

    Each forward runs on a copy of the modules, see `ModuleCopy`, which backward gives back.

    Args:
        call: model and loss; each forward takes over the attributes that the modules have then.
        what: the name of the model.

    Attributes:
        parameters, buffers: the variables of the call, each once, by its first name there.
        recorded: what runs must have in common with the first ones.
    """

    recorded: Recorded

    def __init__(self, call: TrainingCall, what: str) -> None:
        self.parameters: Mapping[str, nn.Parameter] = dict(call.named_parameters())
        self.buffers: Mapping[str, torch.Tensor] = dict(call.named_buffers())
        self._call, self._what, self._modes = call, what, ThreadModes.now()
        self._plain = call.plain
        self._free: list[ModuleCopy] = []  # whose runs have ended
        self._runs: dict[int, Run] = {}  # by token
        self._tokens = itertools.count()
        self._used = UsedParameters(1)

    # What the operators run

    def begin_step(self, used: UsedParameters) -> None:
        """Called before the runs of a step, which note there what they use."""
        self._used = used

    def forward(
        self,
        seed: torch.Tensor | None,
        leaves: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The loss, a token for backward, and the buffers that are written.

        Raises:
            ExecutionError: the run differs from the first one in what it writes, draws or gives.
        """
        stream = ReplicaStream(int(seed), parameters[0].device) if seed is not None else None
        run = self.run_forward(stream, leaves, parameters, buffers)
        self._check_forward(run)
        number = next(self._tokens)
        token = torch.tensor(number, dtype=torch.int64)
        self._runs[number] = run
        weakref.finalize(token, self._runs.pop, number, None)  # a step that fails drops it
        return [run.loss.detach().reshape(()).clone(), token, *(run.buffers[i] for i in self.recorded.written)]

    def backward(self, token: torch.Tensor, tangent: torch.Tensor) -> list[torch.Tensor]:
        """The gradients, of the types of their parameters.

        Raises:
            ExecutionError: a parameter has a gradient that had none in the first run, or has none in all runs of the step.
        """
        run = self._runs.pop(int(token))
        self.run_backward(run, tangent)
        names = list(self.parameters)
        expected = [names[place] for place in self.recorded.gradients]
        used = [name for name, own in zip(names, run.parameters, strict=True) if own.grad is not None]
        for now, has, those in (
            ("a gradient", "none", [name for name in used if name not in expected]),
            ("no gradient on any device", "one", self._used.note(expected, used)),
        ):
            if those:
                raise ExecutionError(
                    f"the parameter {_short(those[0])!r} has {now} in this call, and had {has} when {self._what} was captured: a "
                    "step updates the same parameters each time. Remedy: have each call use it, if only by adding "
                    "0.0 * parameter.sum() to the loss"
                )
        return [_as_typed(run.parameters[place]) for place in self.recorded.gradients]

    # Runs

    def run_forward(
        self,
        stream: ReplicaStream | None,
        leaves: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
    ) -> Run:
        """Runs forward on these tensors; buffers are copied, so that only the copies are written.

        Raises:
            ExecutionError: forward assigns an attribute, or draws random numbers without a stream.
        """
        try:
            copy = self._free.pop()
        except IndexError:
            copy = ModuleCopy(self._call)
        run = Run(
            copy,
            [_parameter(own, value) for own, value in zip(self.parameters.values(), parameters, strict=True)],
            [value.detach().clone() for value in buffers],
            [value.detach() for value in leaves],
            stream,
        )
        run.versions = [tensor._version for tensor in (*run.parameters, *run.buffers, *run.leaves)]
        originals = (*self.parameters.values(), *self.buffers.values())
        given = dict(zip(map(id, originals), (*run.parameters, *run.buffers), strict=True))
        copy.load(given)
        vars(copy.root)["plain"] = self._plain
        with self._modes.entered(), self._drawing(run, "forward"), nobody_answers(_not_joined(self._what)):
            run.loss = copy.root(*run.leaves)
        assigned = copy.assigned()
        if assigned is not None:
            raise AssignedAttributeError(assigned)
        return run

    def run_backward(self, run: Run, tangent: torch.Tensor) -> None:
        """Runs backward, which leaves gradients at the run's parameters."""
        own = [parameter for parameter in run.parameters if parameter.requires_grad]
        with torch.enable_grad(), self._drawing(run, "backward"), nobody_answers(_not_joined(self._what)):
            run.loss.backward(tangent.reshape(run.loss.shape), inputs=own)
        del run.loss
        run.copy.unload()
        self._free.append(run.copy)

    @contextlib.contextmanager
    def _drawing(self, run: Run, phase: str) -> Iterator[None]:
        """A block that draws from the run's stream; without one, it must draw nothing."""
        if run.stream is not None:
            with run.stream.drawn_from():
                yield
            return
        devices = [torch.device("cpu"), *{p.device for p in run.parameters if p.device.type == "cuda"}]
        before = generator_states(devices)
        yield
        if not all(map(torch.equal, before, generator_states(devices))):
            raise ExecutionError(
                f"{phase} of {self._what} drew random numbers of torch, and drew none when it was captured (or another thread "
                "drew some meanwhile), so that replicas would draw in any order. Remedy: have each call draw, if only by "
                "torch.rand(())"
            )

    def _check_forward(self, run: Run) -> None:
        loss, dtype = run.loss, self.recorded.loss_dtype
        if loss.numel() != 1 or loss.dtype is not dtype or not loss.requires_grad:
            lacking = "" if loss.requires_grad else ", without a gradient,"
            raise ExecutionError(
                f"the loss of {self._what} is {loss.dtype} of shape {list(loss.shape)}{lacking} in this call, and was one number "
                f"of {dtype} with a gradient when it was captured: return such a loss each time"
            )
        for kind, tensors, variables in (
            ("parameter", run.parameters, self.parameters),
            ("argument", run.leaves, ()),
        ):
            for place in run.written(tensors):
                name = f" {_short([*variables][place])!r}" if variables else ""
                raise ExecutionError(
                    f"forward of {self._what} wrote its {kind}{name} in place in this call, and did not when it was captured: "
                    "that stays written, whatever is undone. Remedy: write a copy, and load a checkpoint of the model"
                )
        names = [*self.buffers]
        for place in run.written(run.buffers):
            if place not in self.recorded.written:
                raise ExecutionError(
                    f"forward of {self._what} wrote the buffer {_short(names[place])!r} in this call, and did not when it was "
                    "captured: a step keeps the same buffers each time. Remedy: have each call write it, if only its own value"
                )
            if run.buffers[place].requires_grad:
                raise ExecutionError(
                    f"forward of {self._what} wrote a value that requires a gradient to the buffer {_short(names[place])!r}: "
                    "write the detached value"
                )


class AssignedAttributeError(ExecutionError):
    """Forward has assigned an attribute of a module."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"forward assigns the attribute {name!r} of a module, which would not last: write buffers in place "
            "(self.x.add_(1), self.x.copy_(value)), pass what changes as an argument, and use local variables for what need "
            "not last"
        )
        self.name = name


def _not_joined(what: str) -> CaptureError:
    return CaptureError(
        f"{what} asks for values of all replicas (mirrorc.all_reduce, all_gather, replica_id, ...), which plain PyTorch has "
        "not. Remedy: compile it with capture='dynamo'"
    )


def _short(name: str) -> str:
    return name.removeprefix("model.")


def _parameter(own: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """A parameter with memory of a replica, and with what the user has put on his own."""
    parameter = nn.Parameter(value.detach(), own.requires_grad)
    if own.__dict__:
        parameter.__dict__.update(own.__dict__)
    return parameter


def _as_typed(parameter: nn.Parameter) -> torch.Tensor:
    """A parameter's gradient, in the layout of the parameter; zeros if another replica alone has used it."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None and gradient.layout is torch.strided and gradient.stride() == parameter.stride():
        return gradient
    laid = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device)
    return laid.copy_(gradient) if gradient is not None else laid.zero_()
