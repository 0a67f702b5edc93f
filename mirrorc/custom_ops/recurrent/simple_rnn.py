"""A layer of a plain recurrent net in one direction as two operators: its steps, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from mirrorc.custom_ops.recurrent.scans import LIBRARY, Order, flat

_Optional = torch.Tensor | None


def _scan(
    projected: torch.Tensor,
    h0: torch.Tensor,
    weight: torch.Tensor,
    lengths: _Optional,
    is_relu: bool,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    order = Order(projected, lengths, reverse)
    inputs = order.turned(projected)
    hidden = inputs.new_empty(inputs.shape)
    given, states = inputs.unbind(), hidden.unbind()
    state, turned = h0, weight.t()
    for t in order.steps():
        state = torch.addmm(given[t], state, turned, out=states[t])
        state = state.relu_() if is_relu else state.tanh_()
    last = order.last(hidden)
    return order.turned(order.clear(hidden)), last


def _fake_scan(
    projected: torch.Tensor,
    h0: torch.Tensor,
    weight: torch.Tensor,
    lengths: _Optional,
    is_relu: bool,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    return projected.new_empty(projected.shape), projected.new_empty(projected.shape[1:])


def _scan_backward(
    of_hidden: torch.Tensor,
    of_last: torch.Tensor,
    hidden: torch.Tensor,
    h0: torch.Tensor,
    weight: torch.Tensor,
    lengths: _Optional,
    is_relu: bool,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    order = Order(hidden, lengths, reverse)
    states = order.turned(hidden)
    # first the factors by which gradients of states are multiplied
    result = (states > 0).to(states.dtype) if is_relu else 1 - states * states
    at, of_states, of_state = result.unbind(), order.gradients(of_hidden, of_last), order.after(of_last)
    assert of_states is not None
    for t in reversed(order.steps()):
        at[t].mul_(of_state + of_states[t])
        of_state = torch.mm(at[t], weight)
    of_weight = flat(result).t() @ flat(order.previous(states, h0))
    return order.turned(result), of_state, of_weight


def _fake_scan_backward(
    of_hidden: torch.Tensor,
    of_last: torch.Tensor,
    hidden: torch.Tensor,
    h0: torch.Tensor,
    weight: torch.Tensor,
    lengths: _Optional,
    is_relu: bool,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    return tuple(hidden.new_empty(like.shape) for like in (hidden, h0, weight))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, h0, weight, lengths, ctx.is_relu, ctx.reverse = inputs
    ctx.save_for_backward(output[0], h0, weight, lengths)


def _backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    return *rnn_backward(*gradients, *ctx.saved_tensors, ctx.is_relu, ctx.reverse), None, None, None


_STATES = "Tensor h0, Tensor weight, Tensor? lengths, bool is_relu, bool reverse"
_TAGS = (torch.Tag.needs_fixed_stride_order,)
LIBRARY.define(f"rnn(Tensor projected, {_STATES}) -> (Tensor, Tensor)", tags=_TAGS)
LIBRARY.define(
    f"rnn_backward(Tensor of_hidden, Tensor of_last, Tensor hidden, {_STATES}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
LIBRARY.impl("rnn", _scan, "CompositeExplicitAutograd")
LIBRARY.impl("rnn_backward", _scan_backward, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::rnn", _fake_scan, lib=LIBRARY)
torch.library.register_fake("mirrorc::rnn_backward", _fake_scan_backward, lib=LIBRARY)
torch.library.register_autograd("mirrorc::rnn", _backward, setup_context=_keep, lib=LIBRARY)

rnn = torch.ops.mirrorc.rnn.default
"""``rnn(projected, h0, weight, lengths, is_relu, reverse)``: the steps of a layer of a plain recurrent net.

``projected`` [time, batch, width] is what the states get of the inputs, biases included; ``h0`` [batch, width] the state before
the first step; ``weight`` [width, width] is that for the hidden state of `torch.nn.RNN`; ``lengths`` [batch] as for
`lstm.lstm`. Gives the hidden states [time, batch, width], zeros behind the ends of sequences, and the last one
of each sequence.
"""
rnn_backward = torch.ops.mirrorc.rnn_backward.default
"""The gradients of `rnn`'s ``projected``, ``h0`` and ``weight``."""
