"""Traces an operator in place of torch's LSTM, GRU and RNN."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from mirrorc.capture.call.packed_sequences import PACKING, PaddedSequences
from mirrorc.custom_ops.recurrent import recurrent

_Tensors = Sequence[torch.Tensor]
_Inputs = torch.Tensor | PaddedSequences


def _lstm(inputs: _Inputs, states: _Tensors, parameters: _Tensors, *options: Any) -> tuple[Any, ...]:
    return _run("lstm", inputs, states, parameters, *options)


def _gru(inputs: _Inputs, state: torch.Tensor, parameters: _Tensors, *options: Any) -> tuple[Any, ...]:
    return _run("gru", inputs, (state,), parameters, *options)


def _rnn_tanh(inputs: _Inputs, state: torch.Tensor, parameters: _Tensors, *options: Any) -> tuple[Any, ...]:
    return _run("rnn_tanh", inputs, (state,), parameters, *options)


def _rnn_relu(inputs: _Inputs, state: torch.Tensor, parameters: _Tensors, *options: Any) -> tuple[Any, ...]:
    return _run("rnn_relu", inputs, (state,), parameters, *options)


TRACED_INSTEAD: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _rnn_tanh,
    torch.rnn_relu: _rnn_relu,
    **PACKING,
}
"""The functions of torch that recurrent modules call, and those that pack sequences, with the functions traced in their place."""


def _run(
    kind: str,
    inputs: _Inputs,
    states: _Tensors,
    parameters: _Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, ...]:
    """Runs all layers at once; one by one with dropout between them, which is the graph's, and so follows its seed."""
    is_packed = isinstance(inputs, PaddedSequences)
    values, lengths = (inputs.values, inputs.lengths) if is_packed else (inputs, None)
    if is_packed or batch_first:
        values = values.transpose(0, 1)
    if 0 in values.shape:
        raise RuntimeError(f"Expected sequence length to be larger than 0 in RNN, got an input of {list(values.shape)}")
    products = None
    if torch.is_autocast_enabled(values.device.type) and values.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(values.device.type)
        if values.device.type == "cpu" and (kind == "gru" or (kind == "lstm" and is_packed)):
            dtype, products = torch.promote_types(dtype, states[0].dtype), dtype  # autocast casts for products alone
        values = values.to(dtype)
        states, parameters = [state.to(dtype) for state in states], [parameter.to(dtype) for parameter in parameters]
    has_dropout = train and dropout != 0 and num_layers > 1
    num_calls = num_layers if has_dropout else 1
    each, per_call = len(parameters) // num_calls, states[0].size(0) // num_calls
    is_recorded = torch.is_grad_enabled() and any(one.requires_grad for one in (values, *states, *parameters))
    ends: list[_Tensors] = []
    for call in range(num_calls):
        values = F.dropout(values, dropout, True) if call else values
        first = [state[call * per_call : (call + 1) * per_call] for state in states] if has_dropout else states
        values, *last = recurrent(
            values,
            kind,
            first,
            parameters[call * each : (call + 1) * each],
            lengths,
            has_biases,
            num_layers // num_calls,
            bidirectional,
            products,
            is_recorded,
        )
        ends.append(last[: len(states)])
    last = [torch.cat([end[i] for end in ends]) for i in range(len(states))] if has_dropout else ends[0]
    if is_packed or batch_first:
        values = values.transpose(0, 1)
    return (inputs.of(values) if is_packed else values, *last)
