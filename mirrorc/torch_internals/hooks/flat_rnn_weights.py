"""Parameters of torch's recurrent layers as one list, and in one block of memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def renew_recurrent_weights(layer: nn.RNNBase) -> None:
    """Updates a layer's list of parameters, as a call of the layer would. Parametrized weights are left to that call."""
    names = layer._flat_weights_names
    if all(name in layer._parameters for name in names):
        weights = [layer._parameters[name] for name in names]
        attributes = vars(layer)
        attributes["_flat_weights"] = weights
        attributes["_flat_weight_refs"] = [None if weight is None else weakref.ref(weight) for weight in weights]


def weights_for_cudnn(
    weights: Sequence[torch.Tensor], kind: str, num_layers: int, bidirectional: bool
) -> Sequence[torch.Tensor]:
    """Copies weights on a GPU into one block of memory, to avoid cuDNN's warning. Weights on the CPU stay."""
    if not weights[0].is_cuda or not all(map(torch.backends.cudnn.is_acceptable, weights)):
        return weights
    from torch.backends.cudnn.rnn import get_cudnn_mode

    each = len(weights) // (num_layers * (2 if bidirectional else 1))
    width, outer = weights[0].shape[0] // _GATES[kind], weights[1].shape[1]
    projected = outer if outer != width else 0
    aliases = [weight.detach() for weight in weights]  # flattening moves these
    torch._cudnn_rnn_flatten_weight(
        aliases,
        each,
        weights[0].shape[1],
        get_cudnn_mode(kind.upper()),
        width,
        projected,
        num_layers,
        False,
        bidirectional,
    )
    return aliases
