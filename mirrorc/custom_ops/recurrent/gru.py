"""A layer of a GRU in one direction as two operators: its steps, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from mirrorc.custom_ops.recurrent.scans import LIBRARY, Order, flat

aten = torch.ops.aten
_Optional = torch.Tensor | None


def _scan(
    projected: torch.Tensor,
    h0: torch.Tensor,
    weight: torch.Tensor,
    bias: _Optional,
    lengths: _Optional,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    order, width = Order(projected, lengths, reverse), weight.shape[1]
    inputs = order.turned(projected)
    time, batch, _ = inputs.shape
    gates = inputs.new_empty(time, batch, 3 * width)  # reset, update, and what the new state gets of the last one
    new, hidden = gates.new_empty(time, batch, width), gates.new_empty(time, batch, width)
    at, news, states = gates.unbind(), new.unbind(), hidden.unbind()
    both = gates[..., : 2 * width].unbind()
    resets, updates, recurrent = (part.unbind() for part in gates.split(width, 2))
    into_both, into_new = inputs[..., : 2 * width].unbind(), inputs[..., 2 * width :].unbind()
    state, turned = h0, weight.t()
    for t in order.steps():
        if bias is None:
            torch.mm(state, turned, out=at[t])
        else:
            torch.addmm(bias, state, turned, out=at[t])
        both[t].add_(into_both[t]).sigmoid_()
        torch.addcmul(into_new[t], resets[t], recurrent[t], out=news[t]).tanh_()
        state = torch.lerp(news[t], state, updates[t], out=states[t])
    last = order.last(hidden)
    return order.turned(order.clear(hidden)), last, gates, new


def _fake_scan(
    projected: torch.Tensor,
    h0: torch.Tensor,
    weight: torch.Tensor,
    bias: _Optional,
    lengths: _Optional,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    time, batch, gates = projected.shape
    width = weight.shape[1]
    sizes = ((time, batch, width), (batch, width), (time, batch, gates), (time, batch, width))
    return tuple(projected.new_empty(size) for size in sizes)


def _scan_backward(
    of_hidden: torch.Tensor,
    of_last: torch.Tensor,
    hidden: torch.Tensor,
    gates: torch.Tensor,
    new: torch.Tensor,
    h0: torch.Tensor,
    weight: torch.Tensor,
    bias: _Optional,
    lengths: _Optional,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    order, width = Order(gates, lengths, reverse), weight.shape[1]
    reset, update, recurrent = gates.split(width, 2)
    before = order.previous(order.turned(hidden), h0)
    result = torch.empty_like(gates)  # first the factors by which gradients of states are multiplied
    parts = result.split(width, 2)
    into_new = aten.tanh_backward(1 - update, new)
    aten.sigmoid_backward.grad_input(into_new * recurrent, reset, grad_input=parts[0])
    aten.sigmoid_backward.grad_input(before - new, update, grad_input=parts[1])
    torch.mul(into_new, reset, out=parts[2])
    whole = torch.empty_like(hidden)
    wholes, at, keeps = whole.unbind(), result.unbind(), update.unbind()
    by_gate = result.unflatten(2, (3, width)).unbind()
    of_states = order.gradients(of_hidden, of_last)
    assert of_states is not None
    of_state = order.after(of_last)
    for t in reversed(order.steps()):
        torch.add(of_state, of_states[t], out=wholes[t])
        by_gate[t].mul_(wholes[t].unsqueeze(1))
        of_state = torch.mul(wholes[t], keeps[t]).addmm_(at[t], weight)
    of_weight = flat(result).t() @ flat(before)
    of_bias = flat(result).sum(0) if bias is not None else weight.new_empty(0)
    of_inputs = torch.cat((result[..., : 2 * width], into_new.mul_(whole)), 2)
    return order.turned(of_inputs), of_state, of_weight, of_bias


def _fake_scan_backward(
    of_hidden: torch.Tensor,
    of_last: torch.Tensor,
    hidden: torch.Tensor,
    gates: torch.Tensor,
    new: torch.Tensor,
    h0: torch.Tensor,
    weight: torch.Tensor,
    bias: _Optional,
    lengths: _Optional,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    last = bias.shape if bias is not None else (0,)
    return tuple(gates.new_empty(size) for size in (gates.shape, h0.shape, weight.shape, last))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, h0, weight, bias, lengths, ctx.reverse = inputs
    hidden, _, *saved = output
    ctx.save_for_backward(hidden, *saved, h0, weight, bias, lengths)
    ctx.mark_non_differentiable(*saved)


def _backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    *saved, bias, lengths = ctx.saved_tensors
    *found, of_bias = gru_backward(*gradients[:2], *saved, bias, lengths, ctx.reverse)
    return *found, of_bias if bias is not None else None, None, None


_STATES = "Tensor h0, Tensor weight, Tensor? bias, Tensor? lengths, bool reverse"
_TAGS = (torch.Tag.needs_fixed_stride_order,)
LIBRARY.define(f"gru(Tensor projected, {_STATES}) -> (Tensor, Tensor, Tensor, Tensor)", tags=_TAGS)
LIBRARY.define(
    f"gru_backward(Tensor of_hidden, Tensor of_last, Tensor hidden, Tensor gates, Tensor new, {_STATES}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
LIBRARY.impl("gru", _scan, "CompositeExplicitAutograd")
LIBRARY.impl("gru_backward", _scan_backward, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::gru", _fake_scan, lib=LIBRARY)
torch.library.register_fake("mirrorc::gru_backward", _fake_scan_backward, lib=LIBRARY)
torch.library.register_autograd("mirrorc::gru", _backward, setup_context=_keep, lib=LIBRARY)

gru = torch.ops.mirrorc.gru.default
"""``gru(projected, h0, weight, bias, lengths, reverse)``: the steps of a layer of a GRU.

``projected`` [time, batch, 3 width] is what the gates get of the inputs, their bias included; ``h0`` [batch, width] the state
before the first step; ``weight`` [3 width, width] and ``bias`` [3 width] or None are those for the hidden state of
`torch.nn.GRU`; ``lengths`` [batch] as for `mirrorc.custom_ops.recurrent.lstm.lstm`. Gives the hidden states [time, batch, width],
zeros behind the ends of sequences, the last one of each sequence, and what backward needs.
"""
gru_backward = torch.ops.mirrorc.gru_backward.default
"""The gradients of `gru`'s ``projected``, ``h0``, ``weight`` and ``bias`` (empty if there is none)."""
