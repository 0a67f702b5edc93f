"""Operators that run forward and backward as plain PyTorch, opaque to passes."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from mirrorc.custom_ops.registration import FIXED_STRIDES, register


class UsedParameters:
    """Parameters that any replica has used in this step. Others get no update.

    Attributes:
        absent_outputs: outputs of a module on which the caller's loss does not depend.
        keeps_graph: backward may be called again.
        outputs: outputs that need a gradient on any replica.
        leaves: indices of arguments that got a gradient on any replica.
    """

    def __init__(self, absent_outputs: Set[str] = frozenset(), *, keeps_graph: bool = False) -> None:
        self.absent_outputs, self.keeps_graph = absent_outputs, keeps_graph
        self.outputs, self.leaves = set[str](), set[int]()
        self._used = set[int]()
        self._written: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()

    def note(self, used: torch.Tensor) -> None:
        with self._lock:
            self._used.add(id(used))

    def note_outputs(self, names: Iterable[str]) -> None:
        with self._lock:
            self.outputs.update(names)

    def note_leaf(self, leaf: int) -> None:
        with self._lock:
            self.leaves.add(leaf)

    def first_value(self, buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The value from the first forward of the step."""
        with self._lock:
            return self._written.setdefault(id(buffer), value)

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._used


class RunInputs(NamedTuple):
    seed: torch.Tensor | None
    leaves: Sequence[torch.Tensor]
    parameters: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]


_calls: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def register_call(call: Any) -> int:
    """Returns the lowest free number for an `OpaqueCall`."""
    with _lock:
        number = next(number for number in itertools.count() if number not in _calls)
        _calls[number] = call
    return number


class OpaqueSteps:
    def __init__(self, graphs: Sequence[fx.Graph]) -> None:
        targets = (run_forward, take_gradient)
        found = [graph.find_nodes(op="call_function", target=each) for graph in graphs for each in targets]
        nodes = itertools.chain.from_iterable(found)
        self._numbers = sorted({cast("int", node.args[0]) for node in nodes})

    def begin(self, used: UsedParameters) -> UsedParameters:
        for number in self._numbers:
            _call_of(number).begin_step(used)
        return used


def backward_of(call: int, token: torch.Tensor, tangent: torch.Tensor | None, tangents: Sequence[torch.Tensor]) -> Any:
    return _call_of(call).backward(token, tangent, tangents)


def _call_of(number: int) -> Any:
    call = _calls.get(number)
    if call is None:
        raise RuntimeError(f"the forward {number} that is run as plain PyTorch is gone: its program was dropped")
    return call


def _fake_results(tokens: Sequence[torch.Tensor], *args: Any) -> list[torch.Tensor]:
    *_, parameters, buffers, loss_dtype, written, output_dtypes, output_sizes = args
    loss = [parameters[0].new_empty((), dtype=loss_dtype)] if loss_dtype is not None else []
    outputs = _outputs(parameters[0], output_dtypes, output_sizes)
    return [*loss, *tokens, *_like([buffers[place] for place in written]), *outputs]


def sizes_of(shapes: Sequence[Sequence[int]]) -> list[int]:
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
_RESULTS = "int[] written, ScalarType[] output_dtypes, int[] output_sizes, *, bool exchanges=False"

run_forward = register(
    f"run_forward({_ARGUMENTS}, ScalarType loss_dtype, {_RESULTS}) -> Tensor[]",
    lambda call, *args, **_: _call_of(call).forward(RunInputs(*args[:4])),
    lambda *args, **_: _fake_results([torch.empty((), dtype=torch.int64, device="cpu")], *args),
    tags=FIXED_STRIDES,
)
"""``run_forward(call, seed, leaves, parameters, buffers, loss_dtype, written, output_dtypes, output_sizes)`` is
`OpaqueCall.forward`; ``exchanges=True`` if replicas exchange values in it.

Results: the loss, a scalar; a token, an int64 on the CPU; new values of the buffers at ``written``; contiguous outputs.
``output_sizes`` has the form of `sizes_of`. Python side effects of the call must not last.
"""

take_gradient = register(
    "take_gradient(int call, Tensor token, Tensor? tangent, Tensor like, int place, Tensor[]? tangents=None) -> Tensor",
    lambda call, token, tangent, _, place, tangents=None: _call_of(call).gradient(
        token, tangent, place, tangents or ()
    ),
    lambda call, token, tangent, like, place, tangents=None: _like([like])[0],
    tags=FIXED_STRIDES,
)
"""``take_gradient(call, token, tangent, like, place, tangents)`` is `OpaqueCall.gradient` of ``like``, at ``place``.

``tangent`` (the gradient of the loss; None for 1) and ``tangents`` (the gradients of outputs) are the same for all
gradients of a token. Each gradient may be taken once, in any order, even while backward computes others.
"""

run_evaluation = register(
    f"run_evaluation({_ARGUMENTS}, ScalarType? loss_dtype, {_RESULTS}) -> Tensor[]",
    lambda call, *args, **_: _call_of(call).evaluation(RunInputs(*args[:4])),
    lambda *args, **_: _fake_results([], *args),
    tags=FIXED_STRIDES,
)
"""`OpaqueCall.evaluation`: `run_forward` without a token, and without a loss if ``loss_dtype`` is None."""

OPAQUE = (run_forward, take_gradient, run_evaluation)
