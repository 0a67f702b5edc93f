"""The operators of recurrent layers give what torch gives, and gradients as autograd does, for sequences of any lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from selections import thinned
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mirrorc.custom_ops.recurrent.gru import gru
from mirrorc.custom_ops.recurrent.lstm import lstm
from mirrorc.custom_ops.recurrent.onednn_lstm import onednn_lstm
from mirrorc.custom_ops.recurrent.simple_rnn import rnn

TIME, BATCH, FEATURES, WIDTH = 6, 4, 3, 5
LENGTHS = torch.tensor([3, 6, 1, 4])
Given = Sequence[torch.Tensor]


def run_lstm(p: Given, x: torch.Tensor, states: Given, lengths: Any, reverse: bool) -> Given:
    bias = p[2] + p[3] if len(p) > 3 else None
    projection = p[-1] if len(p) % 2 else None
    return lstm(F.linear(x, p[0], bias), *states, p[1], projection, lengths, reverse)[:3]


def run_gru(p: Given, x: torch.Tensor, states: Given, lengths: Any, reverse: bool) -> Given:
    biases = (p[2], p[3]) if len(p) > 3 else (None, None)
    return gru(F.linear(x, p[0], biases[0]), *states, p[1], biases[1], lengths, reverse)[:2]


def run_rnn(p: Given, x: torch.Tensor, states: Given, lengths: Any, reverse: bool, is_relu: bool = False) -> Given:
    return rnn(F.linear(x, p[0], p[2] + p[3] if len(p) > 3 else None), *states, p[1], lengths, is_relu, reverse)


def run_relu(*given: Any) -> Given:
    return run_rnn(*given, is_relu=True)


KINDS: dict[str, tuple[Callable[..., nn.RNNBase], Callable[..., Given]]] = {
    "lstm": (nn.LSTM, run_lstm),
    "projected": (lambda *sizes, **options: nn.LSTM(*sizes, proj_size=2, **options), run_lstm),
    "gru": (nn.GRU, run_gru),
    "rnn": (nn.RNN, run_rnn),
    "relu": (lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options), run_relu),
}


def made(
    kind: str, bias: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[nn.RNNBase, torch.Tensor, list[torch.Tensor]]:
    """A net of two directions, its input, and its first states [2, batch, width]."""
    torch.manual_seed(1)
    net = KINDS[kind][0](FEATURES, WIDTH, bidirectional=True, bias=bias).to(dtype)
    widths = [net.proj_size or WIDTH, WIDTH] if isinstance(net, nn.LSTM) else [WIDTH]
    x = torch.randn(TIME, BATCH, FEATURES, dtype=dtype, requires_grad=True)
    return net, x, [torch.randn(2, BATCH, width, dtype=dtype, requires_grad=True) for width in widths]


def gradients(net: nn.RNNBase, x: torch.Tensor, states: Given, results: Given) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    loss = sum((r * torch.randn(r.shape, dtype=r.dtype, generator=generator)).sum() for r in results)
    assert isinstance(loss, torch.Tensor)
    return list(torch.autograd.grad(loss, [x, *states, *net.parameters()]))


@pytest.mark.parametrize(("kind", "bias", "lengths"), thinned([*KINDS], [True, False], [None, LENGTHS]))
def test_both_directions_are_those_of_torch(kind: str, bias: bool, lengths: torch.Tensor | None) -> None:
    net, x, states = made(kind, bias)
    first = tuple(states) if isinstance(net, nn.LSTM) else states[0]
    if lengths is None:
        expected, last = net(x, first)
    else:
        packed, last = net(pack_padded_sequence(x, lengths, enforce_sorted=False), first)
        expected, _ = pad_packed_sequence(packed)
    last = last if isinstance(last, tuple) else (last,)
    half = len(net._flat_weights) // 2
    each = [
        KINDS[kind][1](net._flat_weights[i * half : (i + 1) * half], x, [s[i] for s in states], lengths, i == 1)
        for i in range(2)
    ]
    found = torch.cat([one[0] for one in each], 2)
    ends = [torch.stack(of_both) for of_both in zip(each[0][1:], each[1][1:], strict=True)]
    torch.testing.assert_close([found, *ends], [expected, *last])
    torch.testing.assert_close(gradients(net, x, states, [found, *ends]), gradients(net, x, states, [expected, *last]))


@pytest.mark.parametrize("bias", [True, False])
def test_onednn_is_torchs_lstm_in_float32(bias: bool) -> None:
    net, x, states = made("lstm", bias, torch.float32)
    expected, last = net(x, tuple(states))
    weights = net._flat_weights if bias else [p for w in net.all_weights for p in (*w, None, None)]
    each = [onednn_lstm(x, *weights[4 * i : 4 * i + 4], *[s[i] for s in states], i == 1)[:3] for i in range(2)]
    found = torch.cat([one[0] for one in each], 2)
    ends = [torch.stack(of_both) for of_both in zip(each[0][1:], each[1][1:], strict=True)]
    torch.testing.assert_close([found, *ends], [expected, *last])
    torch.testing.assert_close(gradients(net, x, states, [found, *ends]), gradients(net, x, states, [expected, *last]))


def test_what_lies_behind_the_end_of_a_sequence_has_no_effect() -> None:
    net, x, states = made("relu")
    beyond = torch.arange(TIME)[:, None] >= LENGTHS
    results = []
    for value in (0.0, 1e300):  # its products overflow
        given = x.detach().masked_fill(beyond[..., None], value).requires_grad_()
        found = run_relu(net._flat_weights[:4], given, [states[0][0]], LENGTHS, False)
        results.append([*found, *torch.autograd.grad(found[0].sum(), net._flat_weights[1:2])])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("op", ["lstm", "gru", "rnn", "onednn_lstm"])
def test_fake_tensors_lie_as_real_ones(op: str) -> None:
    dtype = torch.float32 if op == "onednn_lstm" else torch.float64
    net, x, states = made("lstm" if op == "onednn_lstm" else op, dtype=dtype)
    p, first = net._flat_weights, [state[0] for state in states]
    arguments: dict[str, Any] = {
        "lstm": (F.linear(x, p[0], p[2]), *first, p[1], None, LENGTHS, True),
        "gru": (F.linear(x, p[0], p[2]), *first, p[1], p[3], LENGTHS, True),
        "rnn": (F.linear(x, p[0], p[2]), *first, p[1], LENGTHS, True, True),
        "onednn_lstm": (x, *p[:4], *first, False),
    }
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    overload = getattr(torch.ops.mirrorc, op).default
    assert set(torch.library.opcheck(overload, arguments[op], test_utils=tests).values()) == {"SUCCESS"}
