"""A layer of an LSTM in float32 on CPUs as torch computes it, with oneDNN: one operator for all steps, and one for its gradients.

They are ATen's own, with the size of the workspace in their types, which ATen's fake versions leave open.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from mirrorc.custom_ops.recurrent.scans import LIBRARY

aten = torch.ops.aten
_Optional = torch.Tensor | None
_LSTM = 2  # ideep::rnn_kind::LSTM


def _scan(
    inputs: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: _Optional,
    bias_hh: _Optional,
    h0: torch.Tensor,
    c0: torch.Tensor,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    weights = _weights(weight_ih, weight_hh, bias_ih, bias_hh)
    has_biases, width = bias_ih is not None, weight_hh.shape[1]
    states = h0.unsqueeze(0).contiguous(), c0.unsqueeze(0).contiguous()
    with torch.enable_grad():  # otherwise it keeps nothing for backward
        hidden, last, last_cell, workspace = aten.mkldnn_rnn_layer.default(
            *(inputs.contiguous(), *weights, *states, reverse, [], _LSTM, width, 1, has_biases, False, False, True)
        )
    return hidden, last.squeeze(0), last_cell.squeeze(0), workspace


def _fake_scan(
    inputs: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: _Optional,
    bias_hh: _Optional,
    h0: torch.Tensor,
    c0: torch.Tensor,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    time, batch, features = inputs.shape
    width = weight_hh.shape[1]
    size = _workspace_size(int(time), int(batch), int(features), int(width), bias_ih is not None)
    hidden = inputs.new_empty(time, batch, width)
    return hidden, torch.empty_like(h0), torch.empty_like(c0), inputs.new_empty(size, dtype=torch.uint8)


def _scan_backward(
    of_hidden: torch.Tensor,
    of_last: torch.Tensor,
    of_last_cell: torch.Tensor,
    hidden: torch.Tensor,
    last: torch.Tensor,
    last_cell: torch.Tensor,
    workspace: torch.Tensor,
    inputs: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: _Optional,
    bias_hh: _Optional,
    h0: torch.Tensor,
    c0: torch.Tensor,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    weights = _weights(weight_ih, weight_hh, bias_ih, bias_hh)
    has_biases, width = bias_ih is not None, weight_hh.shape[1]
    given = (value.unsqueeze(0).contiguous() for value in (h0, c0))
    gave = (hidden, last.unsqueeze(0), last_cell.unsqueeze(0))
    gradients = (of_hidden.contiguous(), of_last.unsqueeze(0).contiguous(), of_last_cell.unsqueeze(0).contiguous())
    of_inputs, of_ih, of_hh, of_bias, _, of_h0, of_c0 = aten.mkldnn_rnn_layer_backward.default(
        *(inputs.contiguous(), *weights, *given, *gave, *gradients),
        *(reverse, _LSTM, width, 1, has_biases, True, False, [], False, workspace),
    )
    return of_inputs, of_ih, of_hh, of_bias, of_h0.squeeze(0), of_c0.squeeze(0)


def _fake_scan_backward(
    of_hidden: torch.Tensor,
    of_last: torch.Tensor,
    of_last_cell: torch.Tensor,
    hidden: torch.Tensor,
    last: torch.Tensor,
    last_cell: torch.Tensor,
    workspace: torch.Tensor,
    inputs: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    bias_ih: _Optional,
    bias_hh: _Optional,
    h0: torch.Tensor,
    c0: torch.Tensor,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    shapes = (inputs.shape, weight_ih.shape, weight_hh.shape, weight_ih.shape[:1], h0.shape, c0.shape)
    return tuple(inputs.new_empty(shape) for shape in shapes)


def _weights(
    weight_ih: torch.Tensor, weight_hh: torch.Tensor, bias_ih: _Optional, bias_hh: _Optional
) -> tuple[torch.Tensor, ...]:
    """The weights as ATen takes them."""
    if bias_ih is None or bias_hh is None:
        bias_ih = bias_hh = weight_ih.new_zeros(weight_ih.shape[0])
    return weight_ih.contiguous(), weight_hh.contiguous(), bias_ih, bias_hh


@functools.cache
def _workspace_size(time: int, batch: int, features: int, width: int, has_biases: bool) -> int:
    """How many bytes forward keeps for backward; oneDNN alone knows.

    A new thread asks it, because it has no fake tensors.
    """
    found: list[int] = []

    def ask() -> None:
        zeros = functools.partial(torch.zeros, dtype=torch.float32, device="cpu")
        bias = zeros(4 * width) if has_biases else None
        inputs, weight_ih, weight_hh = zeros(time, batch, features), zeros(4 * width, features), zeros(4 * width, width)
        state = zeros(batch, width)
        *_, workspace = _scan(inputs, weight_ih, weight_hh, bias, bias, state, state, False)
        found.append(workspace.shape[0])

    thread = threading.Thread(target=ask, name="mirrorc-workspace-size")
    thread.start()
    thread.join()
    return found[0]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *given, ctx.reverse = inputs
    ctx.save_for_backward(*output, *given)
    ctx.mark_non_differentiable(output[3])


def _backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    of_inputs, of_ih, of_hh, of_bias, of_h0, of_c0 = onednn_lstm_backward(*gradients[:3], *saved, ctx.reverse)
    of_biases = (of_bias, of_bias) if saved[7] is not None else (None, None)
    return of_inputs, of_ih, of_hh, *of_biases, of_h0, of_c0, None


_GIVEN = "Tensor inputs, Tensor weight_ih, Tensor weight_hh, Tensor? bias_ih, Tensor? bias_hh, Tensor h0, Tensor c0, bool reverse"
_TAGS = (torch.Tag.needs_fixed_stride_order,)
LIBRARY.define(f"onednn_lstm({_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor)", tags=_TAGS)
LIBRARY.define(
    "onednn_lstm_backward(Tensor of_hidden, Tensor of_last, Tensor of_last_cell, Tensor hidden, Tensor last, Tensor last_cell, "
    f"Tensor workspace, {_GIVEN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
LIBRARY.impl("onednn_lstm", _scan, "CompositeExplicitAutograd")
LIBRARY.impl("onednn_lstm_backward", _scan_backward, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::onednn_lstm", _fake_scan, lib=LIBRARY)
torch.library.register_fake("mirrorc::onednn_lstm_backward", _fake_scan_backward, lib=LIBRARY)
torch.library.register_autograd("mirrorc::onednn_lstm", _backward, setup_context=_keep, lib=LIBRARY)

onednn_lstm = torch.ops.mirrorc.onednn_lstm.default
"""``onednn_lstm(inputs, weight_ih, weight_hh, bias_ih, bias_hh, h0, c0, reverse)``: a layer of `torch.nn.LSTM` in one direction.

``inputs`` [time, batch, features]; weights and biases are the layer's, both biases may be None; ``h0`` and ``c0`` [batch, width].
Gives the hidden states [time, batch, width], the last hidden state, the last cell, and oneDNN's workspace, in bytes.
"""
onednn_lstm_backward = torch.ops.mirrorc.onednn_lstm_backward.default
"""The gradients of `onednn_lstm`'s inputs, weights, both biases (one, which is the same for both), ``h0`` and ``c0``."""
