"""torch's recurrent layers as an operator, whose backward is autograd's."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from mirrorc.torch_internals import recorded_by_autograd

_LIBRARY = torch.library.Library("mirrorc", "FRAGMENT")
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_RECORDED = {"lstm": 20, "gru": 8, "rnn_tanh": 3, "rnn_relu": 3}
"""Values that autograd records at most for each unit, step and example; oneDNN's workspace for an LSTM is the largest."""


@dataclass(frozen=True)
class _Run:
    """A forward, as autograd has recorded it: its results, and the input, first states and parameters."""

    results: Sequence[torch.Tensor]
    leaves: Sequence[torch.Tensor]


_runs: dict[int, _Run] = {}  # by the values of tokens, as long as these exist
_tokens = itertools.count()


def _forward(
    values: torch.Tensor,
    kind: str,
    states: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    lengths: torch.Tensor | None,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    products: torch.dtype | None,
    is_recorded: bool,
) -> list[torch.Tensor]:
    options = (has_biases, num_layers, 0.0, is_recorded, bidirectional)
    autocast = torch.autocast(values.device.type, products) if products is not None else contextlib.nullcontext()
    if not is_recorded:
        with autocast:
            return _results(kind, values, states, _flattened(parameters, kind, *options), lengths, *options)
    # what has given them may write into their memory before backward
    values, states = values.clone(memory_format=torch.contiguous_format), [state.clone() for state in states]
    parameters = _flattened(parameters, kind, *options)
    leaves = [tensor.detach().requires_grad_() for tensor in (values, *states, *parameters)]
    states, parameters = leaves[1 : 1 + len(states)], leaves[1 + len(states) :]
    with recorded_by_autograd(), autocast:
        results = _results(kind, leaves[0], states, parameters, lengths, *options)
    number = next(_tokens)
    token = torch.tensor(number, dtype=torch.int64)
    _runs[number] = _Run(results, leaves)
    weakref.finalize(token, _runs.pop, number, None)
    return [*(result.detach().clone() for result in results), token]


def _results(
    kind: str,
    values: torch.Tensor,
    states: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    lengths: torch.Tensor | None,
    *options: Any,
) -> list[torch.Tensor]:
    """The hidden states of the last layer [time, batch, width], and the last states."""
    run: Any = getattr(torch, kind)
    given = list(states) if kind == "lstm" else states[0]
    if lengths is None:
        return [result.contiguous() for result in run(values, given, list(parameters), *options, False)]
    packed = pack_padded_sequence(values, lengths.cpu(), enforce_sorted=False)
    order, back = packed.sorted_indices, packed.unsorted_indices
    by_length = [state.index_select(1, order) for state in states]
    given = by_length if kind == "lstm" else by_length[0]
    data, *last = run(packed.data, packed.batch_sizes, given, list(parameters), *options)
    hidden, _ = pad_packed_sequence(PackedSequence(data, packed.batch_sizes, order, back), total_length=len(values))
    return [hidden, *(state.index_select(1, back) for state in last)]


def _flattened(
    parameters: Sequence[torch.Tensor], kind: str, has_biases: bool, num_layers: int, *options: Any
) -> Sequence[torch.Tensor]:
    """Parameters in one piece of memory on a GPU, as cuDNN takes them without a warning; see `nn.RNNBase.flatten_parameters`."""
    if not parameters[0].is_cuda or not all(map(torch.backends.cudnn.is_acceptable, parameters)):
        return parameters
    from torch.backends.cudnn.rnn import get_cudnn_mode

    bidirectional = bool(options[-1])
    each = len(parameters) // (num_layers * (2 if bidirectional else 1))
    width = parameters[0].shape[0] // _GATES[kind]
    outer = parameters[1].shape[1]
    aliases = [parameter.detach() for parameter in parameters]
    sizes = (parameters[0].shape[1], get_cudnn_mode(kind.upper()), width, outer if outer != width else 0, num_layers)
    torch._cudnn_rnn_flatten_weight(aliases, each, *sizes, False, bidirectional)
    return aliases


def _fake_forward(
    values: torch.Tensor,
    kind: str,
    states: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    lengths: torch.Tensor | None,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    products: torch.dtype | None,
    is_recorded: bool,
) -> list[torch.Tensor]:
    time, batch, _ = values.shape
    hidden = values.new_empty(time, batch, states[0].shape[2] * (2 if bidirectional else 1))
    results = [hidden, *(state.new_empty(state.shape) for state in states)]
    if not is_recorded:
        return results
    units = states[-1].shape[0] * -(-states[-1].shape[2] // 16) * 16  # oneDNN fills its rows up
    recorded = values.numel() + hidden.numel() + time * batch * units * _RECORDED[kind]
    memory = torch.empty(recorded * values.dtype.itemsize // 8 + 1, dtype=torch.int64, device="cpu")
    return [*results, memory.as_strided((), ())]  # in accounts of memory, the token has that of the run


def _backward(
    gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], token: torch.Tensor, places: Sequence[int]
) -> list[torch.Tensor]:
    run = _runs[int(token)]
    # once more for each backward of equal forwards that have become one
    results = torch.autograd.grad(run.results, [run.leaves[i] for i in places], list(gradients), retain_graph=True)
    seen: set[int] = set()  # the gradients of both biases may be one tensor
    return [result.clone() if id(result) in seen or seen.add(id(result)) else result.contiguous() for result in results]


def _fake_backward(
    gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], token: torch.Tensor, places: Sequence[int]
) -> list[torch.Tensor]:
    return [inputs[place].new_empty(inputs[place].shape) for place in places]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    values, _, states, parameters, *_ = inputs
    ctx.num_states = len(states)
    ctx.save_for_backward(output[-1], values, *states, *parameters)
    ctx.mark_non_differentiable(output[-1])


def _differentiated(ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    token, *inputs = ctx.saved_tensors
    needs = ctx.needs_input_grad
    flat = [needs[0], *needs[2], *needs[3]]
    places = [place for place, needed in enumerate(flat) if needed]
    found = dict(zip(places, recurrent_backward(gradients[:-1], inputs, token, places), strict=True))
    states, end = [found.get(1 + i) for i in range(ctx.num_states)], 1 + ctx.num_states
    return found.get(0), None, states, [found.get(i) for i in range(end, len(inputs))], *[None] * 6


_TAGS = (torch.Tag.needs_fixed_stride_order,)
_LIBRARY.define(
    "recurrent(Tensor values, str kind, Tensor[] states, Tensor[] parameters, Tensor? lengths, bool has_biases, "
    "int num_layers, bool bidirectional, ScalarType? products, bool is_recorded) -> Tensor[]",
    tags=_TAGS,
)
_LIBRARY.define(
    "recurrent_backward(Tensor[] gradients, Tensor[] inputs, Tensor token, int[] places) -> Tensor[]", tags=_TAGS
)
_LIBRARY.impl("recurrent", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("recurrent_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::recurrent", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("mirrorc::recurrent_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("mirrorc::recurrent", _differentiated, setup_context=_keep, lib=_LIBRARY)

recurrent = torch.ops.mirrorc.recurrent.default
recurrent_backward = torch.ops.mirrorc.recurrent_backward.default
