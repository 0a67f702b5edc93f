"""torch's recurrent layers as one operator, with autograd's backward, and a check of lengths like `pack_padded_sequence`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from mirrorc.custom_ops.registration import FIXED_STRIDES, RunTokens, register
from mirrorc.torch_internals import recorded_by_autograd, weights_for_cudnn

_RECORDED = {"lstm": 20, "gru": 8, "rnn_tanh": 3, "rnn_relu": 3}
"""The most values that autograd saves per unit, step and example. The largest is oneDNN's workspace for an LSTM."""


@dataclass(frozen=True)
class _Run:
    results: Sequence[torch.Tensor]
    leaves: Sequence[torch.Tensor]


_runs: RunTokens[_Run] = RunTokens()


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
    parameters = weights_for_cudnn(parameters, kind, num_layers, bidirectional)
    autocast = torch.autocast(values.device.type, products) if products is not None else contextlib.nullcontext()
    if not is_recorded:
        with autocast:
            return _results(kind, values, states, parameters, lengths, *options)
    # copies: other operators may write into the arguments' memory before backward
    values, states = values.clone(memory_format=torch.contiguous_format), [state.clone() for state in states]
    leaves = [tensor.detach().requires_grad_() for tensor in (values, *states, *parameters)]
    states, parameters = leaves[1 : 1 + len(states)], leaves[1 + len(states) :]
    with recorded_by_autograd(), autocast:
        results = _results(kind, leaves[0], states, parameters, lengths, *options)
    token = _runs.add(_Run(results, leaves))
    return [*(result.detach().clone() for result in results), token]


def _results(
    kind: str,
    values: torch.Tensor,
    states: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    lengths: torch.Tensor | None,
    *options: Any,
) -> list[torch.Tensor]:
    run: Any = getattr(torch, kind)
    parameters = list(parameters)
    if lengths is None:
        first = list(states) if kind == "lstm" else states[0]
        return [result.contiguous() for result in run(values, first, parameters, *options, False)]
    packed = pack_padded_sequence(values, lengths.cpu(), enforce_sorted=False)
    order, back = packed.sorted_indices, packed.unsorted_indices
    assert order is not None and back is not None, "sequences may be in any order"
    by_length = [state.index_select(1, order) for state in states]
    first = by_length if kind == "lstm" else by_length[0]
    data, *last = run(packed.data, packed.batch_sizes, first, parameters, *options)
    hidden, _ = pad_packed_sequence(PackedSequence(data, packed.batch_sizes, order, back), total_length=len(values))
    return [hidden, *(state.index_select(1, back) for state in last)]


def _fake_forward(values: torch.Tensor, kind: str, states: Sequence[torch.Tensor], *options: Any) -> list[torch.Tensor]:
    *_, bidirectional, _, is_recorded = options
    time, batch, _ = values.shape
    hidden = values.new_empty(time, batch, states[0].shape[2] * (2 if bidirectional else 1))
    results = [hidden, *(state.new_empty(state.shape) for state in states)]
    if not is_recorded:
        return results
    units = states[-1].shape[0] * -(-states[-1].shape[2] // 16) * 16  # oneDNN fills its rows up
    recorded = values.numel() + hidden.numel() + time * batch * units * _RECORDED[kind]
    memory = torch.empty(recorded * values.dtype.itemsize // 8 + 1, dtype=torch.int64, device="cpu")
    return [*results, memory.as_strided((), ())]  # estimates of memory count the run's memory as the token's


def _backward(
    gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], token: torch.Tensor, places: Sequence[int]
) -> list[torch.Tensor]:
    run = _runs[token]
    # the graph is retained: equal forwards may be one call, with a backward for each
    results = torch.autograd.grad(run.results, [run.leaves[i] for i in places], list(gradients), retain_graph=True)
    distinct: list[torch.Tensor] = []
    for result in results:  # the gradients of both biases may be one tensor
        is_shared = any(result is other for other in distinct)
        distinct.append(result.clone() if is_shared else result.contiguous())
    return distinct


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Sequence[torch.Tensor]) -> None:
    values, _, states, parameters, *_ = inputs
    ctx.num_states = len(states)
    ctx.save_for_backward(output[-1], values, *states, *parameters)
    ctx.mark_non_differentiable(output[-1])


def _differentiated(ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    token, *inputs = ctx.saved_tensors
    needs = ctx.needs_input_grad
    places = [place for place, is_needed in enumerate((needs[0], *needs[2], *needs[3])) if is_needed]
    by_place = dict(zip(places, recurrent_backward(gradients[:-1], inputs, token, places), strict=True))
    of_values, *others = map(by_place.get, range(len(inputs)))
    return of_values, None, others[: ctx.num_states], others[ctx.num_states :], *[None] * 6


recurrent = register(
    "recurrent(Tensor values, str kind, Tensor[] states, Tensor[] parameters, Tensor? lengths, bool has_biases, "
    "int num_layers, bool bidirectional, ScalarType? products, bool is_recorded) -> Tensor[]",
    _forward,
    _fake_forward,
    tags=FIXED_STRIDES,
    gradient=_differentiated,
    keep=_keep,
)
"""Layers of `torch.nn.LSTM`, `torch.nn.GRU` or `torch.nn.RNN`, without dropout, by torch's own function.

Args:
    values: the input [time, batch, features].
    kind: the name of torch's function, such as ``"lstm"``.
    lengths: the sequences' lengths, int64 [batch], or None.
    products: the dtype of autocast, or None.
    is_recorded: a backward may follow.

Returns:
    The hidden states of the last layer [time, batch, width], zeros after the ends of sequences; the last states; and a
        token for `recurrent_backward` if ``is_recorded``. Autograd's graph lives as long as the token.
"""
recurrent_backward = register(
    "recurrent_backward(Tensor[] gradients, Tensor[] inputs, Tensor token, int[] places) -> Tensor[]",
    _backward,
    lambda gradients, inputs, token, places: [inputs[place].new_empty(inputs[place].shape) for place in places],
    tags=FIXED_STRIDES,
)
"""Gradients of the inputs of `recurrent` at ``places`` among its values, states and parameters.

``gradients`` are gradients of the results of `recurrent`, without the token. Backward may run several times.
"""


def _checked(lengths: torch.Tensor, time: int, is_sorted: bool) -> torch.Tensor:
    result = lengths.to(torch.int64, copy=True)
    values = result.tolist()
    if min(values) <= 0:
        raise RuntimeError(
            f"Length of all samples has to be greater than 0, but found an element in 'lengths' that is <= 0: {min(values)}"
        )
    if max(values) > time:
        raise RuntimeError(f"a sequence is said to have {max(values)} items, but the padded tensor has {time}")
    if is_sorted and values != sorted(values, reverse=True):
        raise RuntimeError(
            "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. You can pass "
            "`enforce_sorted=False` to pack_padded_sequence"
        )
    return result


checked_lengths = register(
    "checked_lengths(Tensor lengths, int time, bool is_sorted) -> Tensor",
    _checked,
    lambda lengths, time, is_sorted: lengths.new_empty(lengths.shape, dtype=torch.int64),
)
"""``checked_lengths(lengths, time, is_sorted)``: a copy of the lengths [batch] as int64.

Raises RuntimeError if a length is not positive or exceeds the time, or if lengths are unsorted despite ``is_sorted``.
"""
