"""What is traced in place of torch's LSTM, GRU and RNN: one operator for all steps of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from mirrorc.custom_ops.gru import gru as gru_steps
from mirrorc.custom_ops.lstm import lstm as lstm_steps
from mirrorc.custom_ops.onednn_lstm import onednn_lstm
from mirrorc.custom_ops.simple_rnn import rnn as rnn_steps

_Tensors = Sequence[torch.Tensor]
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def _lstm(inputs: torch.Tensor, states: _Tensors, params: _Tensors, *options: Any) -> tuple[torch.Tensor, ...]:
    return _run_layers(_lstm_layer, *_as_autocast_has_them(inputs, states, params), *options)


def _gru(inputs: torch.Tensor, state: torch.Tensor, params: _Tensors, *options: Any) -> tuple[torch.Tensor, ...]:
    if inputs.device.type == "cpu":  # there autocast casts for products alone, and a state of float32 stays one
        return _run_layers(_gru_layer, inputs, (state,), params, *options)
    return _run_layers(_gru_layer, *_as_autocast_has_them(inputs, (state,), params), *options)


def _rnn_tanh(inputs: torch.Tensor, state: torch.Tensor, params: _Tensors, *options: Any) -> tuple[torch.Tensor, ...]:
    return _run_layers(_tanh_layer, *_as_autocast_has_them(inputs, (state,), params), *options)


def _rnn_relu(inputs: torch.Tensor, state: torch.Tensor, params: _Tensors, *options: Any) -> tuple[torch.Tensor, ...]:
    return _run_layers(_relu_layer, *_as_autocast_has_them(inputs, (state,), params), *options)


TRACED_INSTEAD: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _rnn_tanh,
    torch.rnn_relu: _rnn_relu,
}
"""The functions of torch that recurrent modules call, and those that are traced in their place."""


def _as_autocast_has_them(
    inputs: torch.Tensor, states: _Tensors, params: _Tensors
) -> tuple[torch.Tensor, _Tensors, _Tensors]:
    """What a recurrent net is given, in the type in which it runs under autocast."""
    kind = inputs.device.type
    if not torch.is_autocast_enabled(kind) or inputs.dtype == torch.float64:
        return inputs, states, params
    dtype = torch.get_autocast_dtype(kind)
    return inputs.to(dtype), [state.to(dtype) for state in states], [param.to(dtype) for param in params]


def _run_layers(
    layer: Callable[..., _Tensors],
    inputs: torch.Tensor,
    states: _Tensors,
    params: _Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Runs layers, with dropout between them.

    Args:
        layer: runs one in one direction, on inputs, states, params and whether time runs backwards; gives its hidden states, and
            its last states.
        inputs: [time, batch, features], or with ``batch_first`` [batch, time, features].
        states: each [layers times directions, batch, width].
        params: of all layers and directions.

    Returns:
        What the last layer gives, and the last states, like ``states``.
    """
    if 0 in inputs.shape:
        raise RuntimeError(f"Expected sequence length to be larger than 0 in RNN, got an input of {list(inputs.shape)}")
    directions = 2 if bidirectional else 1
    each = len(params) // (num_layers * directions)
    values = inputs.transpose(0, 1) if batch_first else inputs
    last: list[_Tensors] = []
    for number in range(num_layers):
        given: list[torch.Tensor] = []
        for direction in range(directions):
            place = number * directions + direction
            own = params[place * each : (place + 1) * each]
            first = [state[place] for state in states]
            hidden, *ends = layer(values, first, own, has_biases, direction == 1)
            given.append(hidden)
            last.append(ends)
        values = torch.cat(given, 2) if bidirectional else given[0]
        if train and dropout != 0 and number < num_layers - 1:
            values = F.dropout(values, dropout, True)
    ends = [torch.stack([ends[i] for ends in last]) for i in range(len(states))]
    return (values.transpose(0, 1) if batch_first else values, *ends)


def _lstm_layer(inputs: torch.Tensor, states: _Tensors, params: _Tensors, has_biases: bool, reverse: bool) -> _Tensors:
    weight_ih, weight_hh = params[0], params[1]
    bias_ih, bias_hh = (params[2], params[3]) if has_biases else (None, None)
    has_projection = len(params) % 2 == 1
    is_usual = inputs.device.type == "cpu" and inputs.dtype == torch.float32 and not has_projection
    if is_usual and _HAS_ONEDNN:
        return onednn_lstm(inputs, weight_ih, weight_hh, bias_ih, bias_hh, states[0], states[1], reverse)[:3]
    bias = bias_ih + bias_hh if bias_ih is not None and bias_hh is not None else None
    projected = F.linear(inputs, weight_ih, bias)
    projection = params[-1] if has_projection else None
    return lstm_steps(projected, states[0], states[1], weight_hh, projection, None, reverse)[:3]


def _gru_layer(inputs: torch.Tensor, states: _Tensors, params: _Tensors, has_biases: bool, reverse: bool) -> _Tensors:
    state, weight = states[0], params[1]
    bias_ih, bias_hh = (params[2], params[3]) if has_biases else (None, None)
    projected = F.linear(inputs, params[0], bias_ih)
    if torch.is_autocast_enabled(inputs.device.type):
        dtype = torch.promote_types(projected.dtype, state.dtype)
        projected, state, weight = projected.to(dtype), state.to(dtype), weight.to(dtype)
        bias_hh = bias_hh.to(dtype) if bias_hh is not None else None
    return gru_steps(projected, state, weight, bias_hh, None, reverse)[:2]


def _tanh_layer(inputs: torch.Tensor, states: _Tensors, params: _Tensors, has_biases: bool, reverse: bool) -> _Tensors:
    bias = params[2] + params[3] if has_biases else None
    return rnn_steps(F.linear(inputs, params[0], bias), states[0], params[1], None, False, reverse)


def _relu_layer(inputs: torch.Tensor, states: _Tensors, params: _Tensors, has_biases: bool, reverse: bool) -> _Tensors:
    bias = params[2] + params[3] if has_biases else None
    return rnn_steps(F.linear(inputs, params[0], bias), states[0], params[1], None, True, reverse)
