"""TorchScript modules, copied with new parameters and buffers, and the parameters of torch's recurrent layers."""

from __future__ import annotations

import inspect
import io
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

_TABLES = ("_parameters", "_buffers")
_PLAIN = (int, float, complex, bool, str, type(None), torch.device, torch.dtype)


def _native(module: nn.Module) -> Any:
    return module._c


def is_script_module(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def forward_signature(module: nn.Module) -> inspect.Signature:
    if not is_script_module(module):
        return inspect.signature(module.forward)
    _, *arguments = _native(module)._get_method("forward").schema.arguments
    return inspect.Signature([_parameter(argument) for argument in arguments])


def _parameter(argument: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
    return inspect.Parameter(argument.name, kind, default=default)


def object_within(module: nn.Module) -> str | None:
    """The name of an attribute whose object would be shared by copies of a TorchScript module; or None."""
    for part in module.modules():
        for name in _attribute_names(part):
            if _shown(getattr(part, name)) is None:
                return name
    return None


def _attribute_names(part: nn.Module) -> list[str]:
    others = {*part._parameters.keys(), *part._buffers.keys(), "_is_full_backward_hook"}
    return [name for name in part._concrete_type.get_attributes() if name not in others]  # type: ignore[union-attr, operator]


def _compiled_anew(original: nn.Module) -> nn.Module:
    """Saves and loads the module: deep copies would share code, which torch optimizes in first runs."""
    written = io.BytesIO()
    torch.jit.save(original, written)
    return torch.jit.load(io.BytesIO(written.getvalue()))


class ScriptCopy:
    """A copy of an outermost TorchScript module for one thread.

    Attributes:
        pairs: each module within the original, including itself, and its copy.
    """

    def __init__(self, original: nn.Module) -> None:
        self.module = _compiled_anew(original)
        self.pairs = list(zip(original.modules(), self.module.modules(), strict=True))
        self._loaded: list[tuple[str, nn.Module, Any, Any]] = []
        self.unload()

    def load(self, replaced: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._loaded = []
        for source, copy in self.pairs:
            for name in _attribute_names(source):
                value = getattr(source, name)
                _native(copy).setattr(name, value)
                self._loaded.append((name, copy, value, _shown(value)))
        for name, source, copy in self._tensors():
            _native(copy).setattr(name, replaced(getattr(source, name)))

    def unload(self) -> None:
        self._loaded = []
        for name, source, copy in self._tensors():
            _native(copy).setattr(name, torch.empty(0, dtype=getattr(source, name).dtype))

    def changed(self) -> str | None:
        """An attribute other than a parameter or buffer that has changed since `load`; or None."""
        return next((name for name, copy, _, shown in self._loaded if _shown(getattr(copy, name)) != shown), None)

    def _tensors(self) -> Iterator[tuple[str, nn.Module, nn.Module]]:
        for source, copy in self.pairs:
            for table in _TABLES:
                for name, tensor in getattr(source, table).items():
                    if tensor is not None:
                        yield name, source, copy


def _shown(value: Any) -> tuple[Any, ...] | None:
    """A summary that is equal as long as the value does not change; None if the value may hold an object."""
    if isinstance(value, torch.Tensor):
        return "tensor", id(value), value._version, value.shape
    if isinstance(value, dict):
        return _shown([item for pair in value.items() for item in pair])
    if isinstance(value, list | tuple):
        items = tuple(map(_shown, value))
        return None if None in items else (type(value).__name__, items)
    return (type(value).__name__, repr(value)) if isinstance(value, _PLAIN) else None


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
