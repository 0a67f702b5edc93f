"""The operator of recurrent layers gives torch's values and autograd's gradients, for sequences of any lengths."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from selections import thinned
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mirrorc.analysis.memory.recomputed_values import num_bytes_of
from mirrorc.custom_ops import recurrent as operators
from mirrorc.custom_ops.recurrent import recurrent

TIME, BATCH, FEATURES, WIDTH = 6, 4, 3, 5
LENGTHS = torch.tensor([3, 6, 1, 4])
KINDS: dict[str, tuple[str, Callable[..., nn.RNNBase]]] = {
    "lstm": ("lstm", nn.LSTM),
    "projected": ("lstm", lambda *sizes, **options: nn.LSTM(*sizes, proj_size=2, **options)),
    "gru": ("gru", nn.GRU),
    "rnn": ("rnn_tanh", nn.RNN),
    "relu": ("rnn_relu", lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options)),
}


def made(
    kind: str, bias: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[nn.RNNBase, torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(1)
    net = KINDS[kind][1](FEATURES, WIDTH, num_layers=2, bidirectional=True, bias=bias).to(dtype)
    widths = [net.proj_size or WIDTH, WIDTH] if isinstance(net, nn.LSTM) else [WIDTH]
    x = torch.randn(TIME, BATCH, FEATURES, dtype=dtype, requires_grad=True)
    return net, x, [torch.randn(4, BATCH, width, dtype=dtype, requires_grad=True) for width in widths]


def arguments(kind: str, net: nn.RNNBase, x: Any, states: Any, lengths: Any = None, is_recorded: bool = True) -> tuple:
    return (x, KINDS[kind][0], states, net._flat_weights, lengths, net.bias, 2, True, None, is_recorded)


def gradients(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    factors = [torch.randn(result.shape, dtype=result.dtype, generator=generator) for result in results]
    return list(torch.autograd.grad(results, inputs, factors, retain_graph=True))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("kind", "bias", "lengths", "dtype"),
    thinned([*KINDS], [True, False], [None, LENGTHS], [torch.float64, torch.float32]),
)
def test_values_and_gradients_are_those_of_torch(
    kind: str, bias: bool, lengths: torch.Tensor | None, dtype: torch.dtype
) -> None:
    net, x, states = made(kind, bias, dtype)
    first = tuple(states) if isinstance(net, nn.LSTM) else states[0]
    if lengths is None:
        expected, last = net(x, first)
    else:
        packed, last = net(pack_padded_sequence(x, lengths, enforce_sorted=False), first)
        expected, _ = pad_packed_sequence(packed)
    wanted = [expected, *(last if isinstance(last, tuple) else (last,))]
    *results, token = recurrent(*arguments(kind, net, x, states, lengths))
    assert not token.requires_grad
    torch.testing.assert_close(results, wanted)
    for inputs in ([x, *states, *net.parameters()], [states[0], *net.parameters()][::2]):
        torch.testing.assert_close(gradients(results, inputs), gradients(wanted, inputs))
    alone = recurrent(*arguments(kind, net, x, states, lengths, is_recorded=False))
    torch.testing.assert_close(alone, wanted)


def test_padding_has_no_effect() -> None:
    net, x, states = made("relu")
    beyond = torch.arange(TIME)[:, None] >= LENGTHS
    results = []
    for value in (0.0, 1e300):  # its products overflow
        padded = x.detach().masked_fill(beyond[..., None], value).requires_grad_()
        run = recurrent(*arguments("relu", net, padded, states, LENGTHS))[:-1]
        results.append([*run, *gradients(run, list(net.parameters()))])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_run_lives_as_long_as_its_token_and_owns_its_memory() -> None:
    """A backward may run several times, whatever has been written meanwhile into what forward took and gave."""
    net, x, states = made("gru")
    x, states = x.detach(), [state.detach() for state in states]
    net.requires_grad_(False)
    before = len(operators._runs)
    results = recurrent(*arguments("gru", net, x, states))
    assert len(operators._runs) == before + 1
    token, factors = results[-1], [torch.ones_like(result) for result in results[:-1]]
    inputs = [x, *states, *net._flat_weights]
    first, second = ([*operators.recurrent_backward(factors, inputs, token, [0, 1, 2])] for _ in range(2))
    for tensor in (x, *states, *results[:-1]):
        tensor.numpy()[:] = 7.0
    third = operators.recurrent_backward(factors, inputs, token, [0, 1, 2])
    torch.testing.assert_close([second, third], [first, first], rtol=0, atol=0)
    del results, token
    assert len(operators._runs) == before


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fake_tensors_lie_as_real_ones(kind: str, lengths: torch.Tensor | None, dtype: torch.dtype) -> None:
    net, x, states = made(kind, dtype=dtype)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checked = torch.library.opcheck(recurrent, arguments(kind, net, x, states, lengths), test_utils=tests)
    assert set(checked.values()) == {"SUCCESS"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [8, 64])
def test_the_token_counts_as_what_autograd_records(kind: str, dtype: torch.dtype, width: int) -> None:
    net = KINDS[kind][1](width, width, num_layers=2, bidirectional=True).to(dtype)
    x = torch.randn(50, 8, width, dtype=dtype, requires_grad=True)
    states = [torch.zeros(4, 8, width, dtype=dtype) for _ in range(2 if kind == "lstm" else 1)]
    memory: dict[int, torch.Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: memory.setdefault(t.data_ptr(), t), lambda t: t):
        recorded = net(x)
    weights = {weight.data_ptr() for weight in net.parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in memory.values()}
    num_bytes = sum(size for address, size in storages.items() if address not in weights)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in (x, *states, *net._flat_weights)]
        end = 1 + len(states)
        token = recurrent(fake[0], KINDS[kind][0], fake[1:end], fake[end:], None, True, 2, True, None, True)[-1]
    node = torch.fx.Graph().placeholder("token")
    node.meta["val"] = token
    assert recorded is not None and num_bytes <= num_bytes_of(node) < 6 * num_bytes
