"""Recurrent layers compute with the parameters that they have in their tables."""

import torch
from torch import nn
from torch.nn.utils import parametrizations

from mirrorc.torch_internals import renew_recurrent_weights


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
