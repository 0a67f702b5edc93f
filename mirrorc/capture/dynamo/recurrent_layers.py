"""Replaces torch's LSTM, GRU and RNN in a trace by one operator."""

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
"""Substitutes in a trace for torch's functions in recurrent modules, and for those that pack sequences."""


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
    options = (has_biases, num_layers, dropout if train else 0.0, bidirectional)
    if isinstance(inputs, PaddedSequences):
        values, *last = _run_layers(kind, inputs.values.transpose(0, 1), inputs.lengths, states, parameters, *options)
        return (inputs.of(values.transpose(0, 1)), *last)
    by_time = inputs.transpose(0, 1) if batch_first else inputs
    values, *last = _run_layers(kind, by_time, None, states, parameters, *options)
    return (values.transpose(0, 1) if batch_first else values, *last)


def _run_layers(
    kind: str,
    values: torch.Tensor,
    lengths: torch.Tensor | None,
    states: _Tensors,
    parameters: _Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
) -> list[torch.Tensor]:
    """Layers with dropout run one by one, so that masks depend on the graph's seed."""
    if 0 in values.shape:
        raise RuntimeError(f"Expected sequence length to be larger than 0 in RNN, got an input of {list(values.shape)}")
    device, products = values.device.type, None
    if torch.is_autocast_enabled(device) and values.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        if device == "cpu" and (kind == "gru" or (kind == "lstm" and lengths is not None)):
            dtype, products = torch.promote_types(dtype, states[0].dtype), dtype  # autocast casts for products alone
        values = values.to(dtype)
        states, parameters = [state.to(dtype) for state in states], [weight.to(dtype) for weight in parameters]
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (values, *states, *parameters))
    if dropout == 0 or num_layers == 1:
        options = (has_biases, num_layers, bidirectional, products, is_recorded)
        return recurrent(values, kind, states, parameters, lengths, *options)[: 1 + len(states)]
    each, per_layer = len(parameters) // num_layers, states[0].size(0) // num_layers
    ends: list[_Tensors] = []
    for layer in range(num_layers):
        first = [state[layer * per_layer : (layer + 1) * per_layer] for state in states]
        weights = parameters[layer * each : (layer + 1) * each]
        dropped = F.dropout(values, dropout, True) if layer else values
        options = (has_biases, 1, bidirectional, products, is_recorded)
        values, *last = recurrent(dropped, kind, first, weights, lengths, *options)
        ends.append(last[: len(states)])
    return [values, *(torch.cat([end[i] for end in ends]) for i in range(len(states)))]
