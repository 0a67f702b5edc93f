"""The lists in which torch's recurrent layers keep their parameters once more."""

from __future__ import annotations

import weakref

from torch import nn


def renew_recurrent_weights(layer: nn.RNNBase) -> None:
    """Lists the parameters that a recurrent layer has now, as torch does where it finds others in a call.

    Weights that are computed, as by a parametrization, are left to the call. Memory stays where it is, also on GPUs.
    """
    names = layer._flat_weights_names
    if all(name in layer._parameters for name in names):
        weights = [layer._parameters[name] for name in names]
        attributes = vars(layer)
        attributes["_flat_weights"] = weights
        attributes["_flat_weight_refs"] = [None if weight is None else weakref.ref(weight) for weight in weights]
