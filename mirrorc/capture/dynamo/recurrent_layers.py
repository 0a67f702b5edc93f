"""What is traced in place of torch's LSTM, GRU and RNN: one operator for all steps of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from mirrorc.capture.call.packed_sequences import PACKING, PaddedSequences
from mirrorc.custom_ops.recurrent.gru import gru as gru_steps
from mirrorc.custom_ops.recurrent.lstm import lstm as lstm_steps
from mirrorc.custom_ops.recurrent.onednn_lstm import onednn_lstm
from mirrorc.custom_ops.recurrent.simple_rnn import rnn as rnn_steps

_Tensors = Sequence[torch.Tensor]
_Inputs = torch.Tensor | PaddedSequences
_Lengths = torch.Tensor | None
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def _lstm(inputs: _Inputs, states: _Tensors, params: _Tensors, *options: Any) -> tuple[Any, ...]:
    if isinstance(inputs, PaddedSequences) and inputs.device.type == "cpu":  # as for a GRU
        return _run(_lstm_layer, inputs, states, params, *options)
    return _run(_lstm_layer, *_as_autocast_has_them(inputs, states, params), *options)


def _gru(inputs: _Inputs, state: torch.Tensor, params: _Tensors, *options: Any) -> tuple[Any, ...]:
    if inputs.device.type == "cpu":  # there autocast casts for products alone, and a state of float32 stays one
        return _run(_gru_layer, inputs, (state,), params, *options)
    return _run(_gru_layer, *_as_autocast_has_them(inputs, (state,), params), *options)


def _rnn_tanh(inputs: _Inputs, state: torch.Tensor, params: _Tensors, *options: Any) -> tuple[Any, ...]:
    return _run(_tanh_layer, *_as_autocast_has_them(inputs, (state,), params), *options)


def _rnn_relu(inputs: _Inputs, state: torch.Tensor, params: _Tensors, *options: Any) -> tuple[Any, ...]:
    return _run(_relu_layer, *_as_autocast_has_them(inputs, (state,), params), *options)


TRACED_INSTEAD: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _rnn_tanh,
    torch.rnn_relu: _rnn_relu,
    **PACKING,
}
"""The functions of torch that recurrent modules call, and those that pack sequences, with what is traced in their place."""


def _as_autocast_has_them(inputs: _Inputs, states: _Tensors, params: _Tensors) -> tuple[_Inputs, _Tensors, _Tensors]:
    """What a recurrent net is given, in the type in which it runs under autocast."""
    kind = inputs.device.type
    if not torch.is_autocast_enabled(kind) or inputs.dtype == torch.float64:
        return inputs, states, params
    dtype = torch.get_autocast_dtype(kind)
    inputs = inputs.of(inputs.values.to(dtype)) if isinstance(inputs, PaddedSequences) else inputs.to(dtype)
    return inputs, [state.to(dtype) for state in states], [param.to(dtype) for param in params]


def _run(
    layer: Callable[..., _Tensors],
    inputs: _Inputs,
    states: _Tensors,
    params: _Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, ...]:
    """Runs layers on a tensor, or on padded sequences, which stay such."""
    options = (has_biases, num_layers, dropout, train, bidirectional)
    if isinstance(inputs, PaddedSequences):
        by_time = inputs.values.transpose(0, 1)
        values, *last = _run_layers(layer, by_time, inputs.lengths, states, params, *options)
        return (inputs.of(values.transpose(0, 1)), *last)
    values, *last = _run_layers(
        layer, inputs.transpose(0, 1) if batch_first else inputs, None, states, params, *options
    )
    return (values.transpose(0, 1) if batch_first else values, *last)


def _run_layers(
    layer: Callable[..., _Tensors],
    values: torch.Tensor,
    lengths: torch.Tensor | None,
    states: _Tensors,
    params: _Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, ...]:
    """Runs layers, with dropout between them.

    Args:
        layer: runs one in one direction, on inputs, lengths, states, params and whether time runs backwards; gives its hidden
            states, and its last states.
        values: [time, batch, features].
        lengths: of the sequences; None if all are as long as the time.
        states: each [layers times directions, batch, width].
        params: of all layers and directions.

    Returns:
        What the last layer gives, and the last states, like ``states``.
    """
    if 0 in values.shape:
        raise RuntimeError(f"Expected sequence length to be larger than 0 in RNN, got an input of {list(values.shape)}")
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    last: list[_Tensors] = []
    for number in range(num_layers):
        given: list[torch.Tensor] = []
        for direction in range(directions):
            place = number * directions + direction
            own = params[place * each : (place + 1) * each]
            first = [state[place] for state in states]
            hidden, *ends = layer(values, lengths, first, own, has_biases, direction == 1)
            given.append(hidden)
            last.append(ends)
        values = torch.cat(given, 2) if bidirectional else given[0]
        if train and dropout != 0 and number < num_layers - 1:
            values = F.dropout(values, dropout, True)
    return (values, *[torch.stack([ends[i] for ends in last]) for i in range(len(states))])


def _lstm_layer(
    inputs: torch.Tensor, lengths: _Lengths, states: _Tensors, params: _Tensors, has_biases: bool, reverse: bool
) -> _Tensors:
    weight_ih, weight_hh = params[0], params[1]
    bias_ih, bias_hh = (params[2], params[3]) if has_biases else (None, None)
    has_projection = len(params) % 2 == 1
    is_usual = inputs.device.type == "cpu" and inputs.dtype == torch.float32 and not has_projection and lengths is None
    if is_usual and _HAS_ONEDNN:
        return onednn_lstm(inputs, weight_ih, weight_hh, bias_ih, bias_hh, states[0], states[1], reverse)[:3]
    bias = bias_ih + bias_hh if bias_ih is not None and bias_hh is not None else None
    projected = F.linear(inputs, weight_ih, bias)
    projection = params[-1] if has_projection else None
    hidden, cell = states
    if torch.is_autocast_enabled(inputs.device.type):
        dtype = torch.promote_types(projected.dtype, hidden.dtype)
        projected, hidden, cell, weight_hh = (one.to(dtype) for one in (projected, hidden, cell, weight_hh))
        projection = projection.to(dtype) if projection is not None else None
    return lstm_steps(projected, hidden, cell, weight_hh, projection, lengths, reverse)[:3]


def _gru_layer(
    inputs: torch.Tensor, lengths: _Lengths, states: _Tensors, params: _Tensors, has_biases: bool, reverse: bool
) -> _Tensors:
    state, weight = states[0], params[1]
    bias_ih, bias_hh = (params[2], params[3]) if has_biases else (None, None)
    projected = F.linear(inputs, params[0], bias_ih)
    if torch.is_autocast_enabled(inputs.device.type):
        dtype = torch.promote_types(projected.dtype, state.dtype)
        projected, state, weight = projected.to(dtype), state.to(dtype), weight.to(dtype)
        bias_hh = bias_hh.to(dtype) if bias_hh is not None else None
    return gru_steps(projected, state, weight, bias_hh, lengths, reverse)[:2]


def _tanh_layer(
    inputs: torch.Tensor, lengths: _Lengths, states: _Tensors, params: _Tensors, has_biases: bool, reverse: bool
) -> _Tensors:
    bias = params[2] + params[3] if has_biases else None
    return rnn_steps(F.linear(inputs, params[0], bias), states[0], params[1], lengths, False, reverse)


def _relu_layer(
    inputs: torch.Tensor, lengths: _Lengths, states: _Tensors, params: _Tensors, has_biases: bool, reverse: bool
) -> _Tensors:
    bias = params[2] + params[3] if has_biases else None
    return rnn_steps(F.linear(inputs, params[0], bias), states[0], params[1], lengths, True, reverse)
