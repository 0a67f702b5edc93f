"""Recurrent layers compute with the parameters that they have in their tables, and cuDNN has them in one piece."""

from typing import Any

import pytest
import torch
import torch.backends.cudnn.rnn
from torch import nn
from torch.nn.utils import parametrizations

from mirrorc.torch_internals import renew_recurrent_weights, weights_for_cudnn


@pytest.mark.slow
def test_a_layer_computes_with_its_new_parameters_and_finds_nothing_changed() -> None:
    x = torch.randn(3, 2, 4)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        layer, other = kind(4, 5, num_layers=2, bidirectional=True), kind(4, 5, num_layers=2, bidirectional=True)
        before = list(layer._flat_weights)
        layer._parameters.update(other._parameters)
        assert layer._weights_have_changed()
        renew_recurrent_weights(layer)
        assert not layer._weights_have_changed()
        torch.testing.assert_close(layer(x)[0], other(x)[0], rtol=0.0, atol=0.0)
        renewed = layer._flat_weights
        assert [id(weight) for weight in renewed] != [id(weight) for weight in before]


def test_computed_weights_are_left_as_they_are() -> None:
    layer = parametrizations.weight_norm(nn.GRU(4, 5), "weight_hh_l0")
    before = layer._flat_weights
    renew_recurrent_weights(layer)
    assert layer._flat_weights is before


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("lstm", nn.LSTM(3, 5, num_layers=2, proj_size=2, bidirectional=True)),
        ("lstm", nn.LSTM(3, 5, bias=False)),
        ("gru", nn.GRU(3, 5, num_layers=2)),
        ("rnn_tanh", nn.RNN(3, 5, bidirectional=True)),
        ("rnn_relu", nn.RNN(3, 5, nonlinearity="relu")),
    ],
)
def test_cudnn_is_told_of_weights_as_by_a_layer(kind: str, layer: nn.RNNBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no GPU: only the calls are compared. A layer's weights stay where they are."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda weight: True)
    monkeypatch.setattr(torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: mode)
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda *call: calls.append(call))
    layer.flatten_parameters()
    aliases = weights_for_cudnn(layer._flat_weights, kind, layer.num_layers, layer.bidirectional)
    (_, *expected), (moved, *options) = calls
    assert options == expected and moved is aliases
    assert all(alias is not weight for alias, weight in zip(aliases, layer._flat_weights, strict=True))


def test_weights_on_a_cpu_are_left_as_they_are() -> None:
    weights = nn.GRU(4, 5)._flat_weights
    assert weights_for_cudnn(weights, "gru", 1, False) is weights
