"""Operators that run forward and backward of a replica as plain PyTorch, which no pass looks into."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import fx

_LIBRARY = torch.library.Library("mirrorc", "FRAGMENT")


class UsedParameters:
    """Which parameters the backwards of one step of a process have used, and what its forwards write alike.

    A parameter that one replica uses has zeros for a gradient on the others, as in a backward of the whole batch. One that none
    uses has no gradient there, and is not updated.
    """

    def __init__(self) -> None:
        self._used = set[int]()
        self._written: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def note(self, used: torch.Tensor) -> None:
        """Notes a parameter of the user's, of which one more backward has a gradient."""
        with self._lock:
            self._used.add(id(used))

    def first_value(self, buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The value that the first forward of the step has given to a buffer of the user's; this one's, if it is the first."""
        with self._lock:
            return self._written.setdefault(id(buffer), value)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether any backward has noted it."""
        return id(parameter) in self._used


class OpaqueBackward(Protocol):
    """A backward as plain PyTorch, which makes one gradient after the other."""

    @property
    def has_ended(self) -> bool:
        """Whether it has, without an error: all gradients are there then."""

    @property
    def may_wait(self) -> bool:
        """Whether what is done while it runs may wait for other replicas; false if it holds what their runs need."""

    def has(self, place: int) -> bool:
        """Whether the gradient of a parameter may be taken."""

    def run(self, on_gradient: Callable[[], object] = lambda: None) -> None:
        """Runs it, once.

        Args:
            on_gradient: is called in this thread, within backward, whenever one more gradient is there.

        Raises:
            BaseException: what backward raises, or ``on_gradient``, which ends it.
        """


class OpaqueRuns(Protocol):
    """What the operators of this module run. Results have the types that their other arguments tell."""

    def begin_step(self, used: UsedParameters) -> None:
        """Called before the runs of a step."""

    def forward(
        self,
        seed: torch.Tensor | None,
        leaves: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The loss, a token for backward, new values of the buffers that are written, and outputs."""

    def evaluation(
        self,
        seed: torch.Tensor | None,
        leaves: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The loss if there is one, new values of the buffers that are written, and outputs."""

    def backward(self, token: torch.Tensor, tangent: torch.Tensor) -> OpaqueBackward:
        """The backward of a forward; ``token`` says of which, ``tangent`` is the gradient of its loss."""

    def gradient(self, token: torch.Tensor, tangent: torch.Tensor, place: int) -> torch.Tensor:
        """The gradient of a parameter, once; runs the backward first if nobody has begun it."""


_calls: weakref.WeakValueDictionary[int, OpaqueRuns] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def register_call(call: OpaqueRuns) -> int:
    """Makes a call known to the operators as long as somebody holds it; gives its number, the lowest free one."""
    with _lock:
        number = next(number for number in itertools.count() if number not in _calls)
        _calls[number] = call
    return number


class OpaqueSteps:
    """The calls that the steps of a program run, which are told before each.

    Args:
        graphs: what the replicas run.
    """

    def __init__(self, graphs: Sequence[fx.Graph]) -> None:
        nodes = [node for graph in graphs for node in graph.find_nodes(op="call_function", target=take_gradient)]
        self._numbers = sorted({cast("int", node.args[0]) for node in nodes})

    def begin(self) -> UsedParameters:
        """Called before each step; gives what its backwards will note."""
        used = UsedParameters()
        for number in self._numbers:
            _call_of(number).begin_step(used)
        return used


def backward_of(call: int, token: torch.Tensor, tangent: torch.Tensor) -> OpaqueBackward:
    """The backward of which `take_gradient` takes gradients, so that it can be run before."""
    return _call_of(call).backward(token, tangent)


def _call_of(number: int) -> OpaqueRuns:
    call = _calls.get(number)
    if call is None:
        raise RuntimeError(f"the forward {number} that is run as plain PyTorch is gone: its program was dropped")
    return call


def _fake_forward(
    call: int,
    seed: torch.Tensor | None,
    leaves: list[torch.Tensor],
    parameters: list[torch.Tensor],
    buffers: list[torch.Tensor],
    loss_dtype: torch.dtype,
    written: list[int],
    output_dtypes: list[torch.dtype],
    output_sizes: list[int],
) -> list[torch.Tensor]:
    loss, token = parameters[0].new_empty((), dtype=loss_dtype), torch.empty((), dtype=torch.int64, device="cpu")
    outputs = _outputs(parameters[0], output_dtypes, output_sizes)
    return [loss, token, *_like([buffers[place] for place in written]), *outputs]


def _fake_evaluation(
    call: int,
    seed: torch.Tensor | None,
    leaves: list[torch.Tensor],
    parameters: list[torch.Tensor],
    buffers: list[torch.Tensor],
    loss_dtype: torch.dtype | None,
    written: list[int],
    output_dtypes: list[torch.dtype],
    output_sizes: list[int],
) -> list[torch.Tensor]:
    loss = [parameters[0].new_empty((), dtype=loss_dtype)] if loss_dtype is not None else []
    outputs = _outputs(parameters[0], output_dtypes, output_sizes)
    return [*loss, *_like([buffers[place] for place in written]), *outputs]


def sizes_of(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Shapes as the operators take them: of each the number of its dimensions, and these."""
    return [number for shape in shapes for number in (len(shape), *shape)]


def _outputs(like: torch.Tensor, dtypes: Sequence[torch.dtype], sizes: Sequence[int]) -> list[torch.Tensor]:
    tensors, place = [], 0
    for dtype in dtypes:
        end = place + 1 + sizes[place]
        tensors.append(like.new_empty(sizes[place + 1 : end], dtype=dtype))
        place = end
    return tensors


def _like(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.new_empty_strided(tensor.shape, tensor.stride()) for tensor in tensors]


_ARGUMENTS = "int call, Tensor? seed, Tensor[] leaves, Tensor[] parameters, Tensor[] buffers"
_RESULTS = "int[] written, ScalarType[] output_dtypes, int[] output_sizes"
_LIBRARY.define(
    f"run_forward({_ARGUMENTS}, ScalarType loss_dtype, {_RESULTS}) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.define(
    f"run_evaluation({_ARGUMENTS}, ScalarType? loss_dtype, {_RESULTS}) -> Tensor[]",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.define(
    "take_gradient(int call, Tensor token, Tensor tangent, Tensor parameter, int place) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl(
    "run_forward",
    lambda call, seed, leaves, parameters, buffers, *_: _call_of(call).forward(seed, leaves, parameters, buffers),
    "CompositeExplicitAutograd",
)
_LIBRARY.impl(
    "run_evaluation",
    lambda call, seed, leaves, parameters, buffers, *_: _call_of(call).evaluation(seed, leaves, parameters, buffers),
    "CompositeExplicitAutograd",
)
_LIBRARY.impl(
    "take_gradient",
    lambda call, token, tangent, _, place: _call_of(call).gradient(token, tangent, place),
    "CompositeExplicitAutograd",
)
torch.library.register_fake("mirrorc::run_forward", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("mirrorc::run_evaluation", _fake_evaluation, lib=_LIBRARY)
torch.library.register_fake(
    "mirrorc::take_gradient", lambda call, token, tangent, parameter, place: _like([parameter])[0], lib=_LIBRARY
)

run_forward = torch.ops.mirrorc.run_forward.default
"""``run_forward(call, seed, leaves, parameters, buffers, loss_dtype, written, output_dtypes, output_sizes)``: what
`OpaqueRuns.forward` gives.

It gives the loss, a scalar of that dtype, a token, which is an int64 on the CPU, new values of the buffers in these places, and
contiguous outputs of these dtypes and sizes (`sizes_of`).
It is a function of its arguments: what Python does in it must not last. A seed is given if random numbers are drawn.
"""

take_gradient = torch.ops.mirrorc.take_gradient.default
"""``take_gradient(call, token, tangent, parameter, place)``: the gradient of this parameter, the one in this place, as
`OpaqueRuns.gradient` gives it.

``token`` is what `run_forward` gave, ``tangent`` the gradient of the loss, the same for all that are taken with a token. Each may
be taken once, in any order, and while backward makes the others.
"""

run_evaluation = torch.ops.mirrorc.run_evaluation.default
"""Takes the same, and gives the same without a token, as `OpaqueRuns.evaluation` does; no loss if it has no dtype."""

OPAQUE = (run_forward, take_gradient, run_evaluation)
