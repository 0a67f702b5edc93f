"""A layer of an LSTM in one direction as two operators: its steps, and their gradients.

What is computed of all inputs at once, the product with the weights for the input, is left to the graph.
"""

from __future__ import annotations

from typing import Any

import torch

from mirrorc.custom_ops.recurrent.scans import LIBRARY, Order, flat

aten = torch.ops.aten
_Optional = torch.Tensor | None


def _scan(
    projected: torch.Tensor,
    h0: torch.Tensor,
    c0: torch.Tensor,
    weight: torch.Tensor,
    projection: _Optional,
    lengths: _Optional,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    order, width = Order(projected, lengths, reverse), weight.shape[0] // 4
    inputs = order.turned(projected)
    time, batch, _ = inputs.shape
    gates = inputs.new_empty(time, batch, 4 * width)
    cells, bounded = gates.new_empty(time, batch, width), gates.new_empty(time, batch, width)
    inner = gates.new_empty(time, batch, width)
    hidden = inner if projection is None else gates.new_empty(time, batch, projection.shape[0])
    given, at, inners, states = inputs.unbind(), gates.unbind(), inner.unbind(), hidden.unbind()
    sigmoids, tanhs = gates[..., : 2 * width].unbind(), gates[..., 2 * width : 3 * width].unbind()
    opened = gates[..., 3 * width :].unbind()
    entering, kept = gates[..., :width].unbind(), gates[..., width : 2 * width].unbind()
    memory, squashed = cells.unbind(), bounded.unbind()
    state, cell, turned = h0, c0, weight.t()
    back = projection.t() if projection is not None else None
    for t in order.steps():
        torch.addmm(given[t], state, turned, out=at[t])
        sigmoids[t].sigmoid_()
        tanhs[t].tanh_()
        opened[t].sigmoid_()
        cell = torch.mul(kept[t], cell, out=memory[t]).addcmul_(entering[t], tanhs[t])
        torch.tanh(cell, out=squashed[t])
        state = torch.mul(opened[t], squashed[t], out=inners[t])
        if back is not None:
            state = torch.mm(state, back, out=states[t])
    last = order.last(hidden), order.last(cells)
    return order.turned(order.clear(hidden)), *last, gates, cells, bounded


def _fake_scan(
    projected: torch.Tensor,
    h0: torch.Tensor,
    c0: torch.Tensor,
    weight: torch.Tensor,
    projection: _Optional,
    lengths: _Optional,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    time, batch, gates = projected.shape
    outer, inner = weight.shape[1], gates // 4
    sizes = [(time, batch, outer), (batch, outer), (batch, inner)]
    sizes += [(time, batch, gates), (time, batch, inner), (time, batch, inner)]
    return tuple(projected.new_empty(size) for size in sizes)


def _scan_backward(
    of_hidden: torch.Tensor,
    of_last: torch.Tensor,
    of_last_cell: torch.Tensor,
    hidden: torch.Tensor,
    gates: torch.Tensor,
    cells: torch.Tensor,
    bounded: torch.Tensor,
    h0: torch.Tensor,
    c0: torch.Tensor,
    weight: torch.Tensor,
    projection: _Optional,
    lengths: _Optional,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    order, width = Order(gates, lengths, reverse), weight.shape[0] // 4
    entering, kept, new, opened = gates.split(width, 2)
    result = torch.empty_like(gates)  # first the factors by which gradients of cells and states are multiplied
    parts = result.split(width, 2)
    aten.sigmoid_backward.grad_input(new, entering, grad_input=parts[0])
    aten.sigmoid_backward.grad_input(order.previous(cells, c0), kept, grad_input=parts[1])
    aten.tanh_backward.grad_input(entering, new, grad_input=parts[2])
    aten.sigmoid_backward.grad_input(bounded, opened, grad_input=parts[3])
    into_cells = aten.tanh_backward(opened, bounded).unbind()
    of_cells, of_open = result[..., : 3 * width].unflatten(2, (3, width)).unbind(), parts[3].unbind()
    keeps, at = kept.unbind(), result.unbind()
    of_states, of_lasting = order.gradients(of_hidden, of_last), order.gradients(None, of_last_cell)
    assert of_states is not None
    whole = torch.empty_like(hidden) if projection is not None else None
    of_state, of_cell = order.after(of_last), order.after(of_last_cell)
    for t in reversed(order.steps()):
        of_state = of_state + of_states[t]
        if projection is not None and whole is not None:
            whole[t] = of_state
            of_state = torch.mm(of_state, projection)
        if of_lasting is not None:
            of_cell = of_cell + of_lasting[t]
        of_cell = torch.addcmul(of_cell, of_state, into_cells[t])
        of_cells[t].mul_(of_cell.unsqueeze(1))
        of_open[t].mul_(of_state)
        of_cell = of_cell * keeps[t]
        of_state = torch.mm(at[t], weight)
    of_weight = flat(result).t() @ flat(order.previous(order.turned(hidden), h0))
    of_projection = weight.new_empty(0)
    if whole is not None:
        of_projection = flat(whole).t() @ flat(opened * bounded)
    return order.turned(result), of_state, of_cell, of_weight, of_projection


def _fake_scan_backward(
    of_hidden: torch.Tensor,
    of_last: torch.Tensor,
    of_last_cell: torch.Tensor,
    hidden: torch.Tensor,
    gates: torch.Tensor,
    cells: torch.Tensor,
    bounded: torch.Tensor,
    h0: torch.Tensor,
    c0: torch.Tensor,
    weight: torch.Tensor,
    projection: _Optional,
    lengths: _Optional,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    last = projection.shape if projection is not None else (0,)
    return tuple(gates.new_empty(size) for size in (gates.shape, h0.shape, c0.shape, weight.shape, last))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, h0, c0, weight, projection, lengths, ctx.reverse = inputs
    hidden, _, _, *saved = output
    ctx.save_for_backward(hidden, *saved, h0, c0, weight, projection, lengths)
    ctx.mark_non_differentiable(*saved)


def _backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
    *saved, projection, lengths = ctx.saved_tensors
    *found, of_projection = lstm_backward(*gradients[:3], *saved, projection, lengths, ctx.reverse)
    return *found, of_projection if projection is not None else None, None, None


_STATES = "Tensor h0, Tensor c0, Tensor weight, Tensor? projection, Tensor? lengths, bool reverse"
_TAGS = (torch.Tag.needs_fixed_stride_order,)
LIBRARY.define(
    f"lstm(Tensor projected, {_STATES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
LIBRARY.define(
    "lstm_backward(Tensor of_hidden, Tensor of_last, Tensor of_last_cell, Tensor hidden, Tensor gates, Tensor cells, "
    f"Tensor bounded, {_STATES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
LIBRARY.impl("lstm", _scan, "CompositeExplicitAutograd")
LIBRARY.impl("lstm_backward", _scan_backward, "CompositeExplicitAutograd")
torch.library.register_fake("mirrorc::lstm", _fake_scan, lib=LIBRARY)
torch.library.register_fake("mirrorc::lstm_backward", _fake_scan_backward, lib=LIBRARY)
torch.library.register_autograd("mirrorc::lstm", _backward, setup_context=_keep, lib=LIBRARY)

lstm = torch.ops.mirrorc.lstm.default
"""``lstm(projected, h0, c0, weight, projection, lengths, reverse)``: the steps of a layer of an LSTM.

``projected`` [time, batch, 4 width] is what the gates get of the inputs, biases included; ``h0`` [batch, outer] and ``c0``
[batch, width] the states before the first step; ``weight`` [4 width, outer] and ``projection`` [outer, width] or None are
those of `torch.nn.LSTM`; ``lengths`` [batch] says how long the sequences are if they are shorter than the time. Gives the
hidden states [time, batch, outer], zeros behind the ends of sequences, the last hidden state and cell of each sequence, and
what backward needs.
"""
lstm_backward = torch.ops.mirrorc.lstm_backward.default
"""The gradients of `lstm`'s ``projected``, ``h0``, ``c0``, ``weight`` and ``projection`` (empty if there is none)."""
