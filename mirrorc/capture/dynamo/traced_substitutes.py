"""Substitutes in a trace: for functions of torch's distributions that read values, SpecAugment, and recurrent layers.

Argument checks of distributions become asserts on tensors, because a trace cannot branch on tensors. SpecAugment is the
random masking in Hugging Face's speech models. LSTM, GRU and RNN are one operator. SyncBatchNorm sees the whole batch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributions import Distribution, constraints, kl
from torch.distributions.utils import lazy_property
from torch.nn import functional as F

from mirrorc.capture.call.containers import PACKING, PaddedSequences
from mirrorc.custom_ops.recurrent import recurrent
from mirrorc.custom_ops.replica_collectives import all_reduce_value
from mirrorc.torch_internals import assert_true

_NO_DIMS = torch.Size()


def _is_dependent(constraint: Any) -> bool:
    return isinstance(constraint, constraints._Dependent)


def _is_made_when_read(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name), lazy_property)


def _begin(
    self: Any, batch_shape: Any = _NO_DIMS, event_shape: Any = _NO_DIMS, validate_args: bool | None = None
) -> None:
    self._batch_shape, self._event_shape = batch_shape, event_shape
    if validate_args is not None:
        self._validate_args = validate_args
    if self._validate_args:
        kind = type(self)
        for name, constraint in self.arg_constraints.items():
            is_there = name in self.__dict__ or not _is_made_when_read(kind, name)
            if is_there and not _is_dependent(constraint):
                is_valid = constraint.check(getattr(self, name)).all()
                assert_true(is_valid, f"the parameter {name} of a distribution {kind.__name__} is out of its bounds")
    super(Distribution, self).__init__()


def _check_value(self: Any, value: Any) -> None:
    kind = type(self).__name__
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"log_prob of a distribution {kind} takes a tensor, not {value!r}")
    if not _fits(value.shape, self._batch_shape, self._event_shape):
        raise ValueError(
            f"a value of shape {tuple(value.shape)} does not fit a distribution {kind} with a batch of shape "
            f"{tuple(self._batch_shape)} and events of shape {tuple(self._event_shape)}"
        )
    assert_true(self.support.check(value).all(), f"a value of a distribution {kind} is out of its support")


def _fits(shape: Any, batch_shape: Any, event_shape: Any) -> bool:
    num_dims = len(event_shape)
    if len(shape) < num_dims or tuple(shape[len(shape) - num_dims :]) != tuple(event_shape):
        return False
    before = tuple(shape[: len(shape) - num_dims])
    return all(n == other or 1 in (n, other) for n, other in zip(before[::-1], batch_shape[::-1], strict=False))


def _kl_divergence(p: Any, q: Any) -> torch.Tensor:
    return _divergence_of(type(p), type(q))(p, q)


def _divergence_of(kind: type, other: type) -> Callable[[Any, Any], torch.Tensor]:
    divergence: Any = kl._dispatch_kl(kind, other)
    return _no_divergence if divergence is NotImplemented else divergence


def _no_divergence(p: Any, q: Any) -> torch.Tensor:
    raise NotImplementedError(
        f"torch has no divergence of a {type(p).__name__} from a {type(q).__name__}: register one by register_kl"
    )


VALIDATIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    constraints.is_dependent: _is_dependent,
    Distribution.__init__: _begin,
    Distribution._validate_sample: _check_value,
    kl.kl_divergence: _kl_divergence,
}
"""Substitutes in a trace for functions of `torch.distributions` that read values."""

ASKED_OF_CLASSES: Collection[Callable[..., Any]] = (_is_made_when_read, _divergence_of)
"""Functions of classes and names only, which are called during the trace and not traced."""


_NAME = "_compute_mask_indices"  # each file of a model has a copy
_PARAMETERS = ["shape", "mask_prob", "mask_length", "attention_mask", "min_masks"]


def masking_functions(root: nn.Module) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    files = {type(module).__module__ for module in root.modules()}
    functions = [
        function
        for file in files
        if file.startswith("transformers.")
        and (function := getattr(sys.modules.get(file), _NAME, None)) is not None
        and function.__module__ == file  # not a substitute by the user
    ]
    return {each: masked_spans for each in functions if list(inspect.signature(each).parameters) == _PARAMETERS}


def masked_spans(
    shape: tuple[int, int],
    mask_prob: float,
    mask_length: int,
    attention_mask: torch.Tensor | None = None,
    min_masks: int = 0,
) -> torch.Tensor:
    """A mask of random spans like Hugging Face's, drawn by torch instead of numpy.

    Args:
        mask_prob: the fraction of a row that non-overlapping spans would cover.
        attention_mask: [rows, positions], ones and then zeros in each row; spans lie among the ones.
    """
    rows, places = shape
    if mask_length < 1:
        raise ValueError("`mask_length` has to be bigger than 0.")
    if mask_length > places:
        raise ValueError("`mask_length` has to be smaller than `sequence_length`")
    lengths = torch.full((rows,), places) if attention_mask is None else attention_mask.detach().sum(-1)
    device = lengths.device
    rounding = torch.empty((), dtype=torch.float64, device=device).uniform_()  # one for all rows
    most = _num_spans(lengths.new_full((1,), places), rounding, places, mask_prob, mask_length, min_masks)
    spans = _num_spans(lengths, rounding, places, mask_prob, mask_length, min_masks)
    beginnings = places - mask_length + 1
    keys = torch.empty((rows, beginnings), dtype=torch.float64, device=device).uniform_()
    is_beyond = torch.arange(beginnings, device=device) >= (lengths - mask_length + 1).unsqueeze(1)
    keys = keys.masked_fill(is_beyond, 2.0)
    largest = keys.sort(dim=1).values.gather(1, (spans - 1).clamp(min=0).unsqueeze(1))
    begins = (keys <= largest) & (spans > 0).unsqueeze(1)
    begun = F.pad(begins.to(torch.int64), (0, mask_length - 1)).cumsum(1)
    masked = begun > F.pad(begun, (mask_length, 0))[:, :places]
    only_last = ((spans == 0) & (most > 0)).unsqueeze(1)  # in a row too short for a span, the last place is masked
    return masked | (only_last & (torch.arange(places, device=device) == places - 1))


def _num_spans(
    lengths: torch.Tensor, rounding: torch.Tensor, places: int, mask_prob: float, mask_length: int, min_masks: int
) -> torch.Tensor:
    wanted = (mask_prob * lengths.to(torch.float64) / mask_length + rounding).to(torch.int64).clamp(min=min_masks)
    wanted = torch.where(wanted * mask_length > places, places // mask_length, wanted)
    return torch.minimum(wanted, (lengths - mask_length + 1).clamp(min=0))


_Tensors = Sequence[torch.Tensor]
_Inputs = torch.Tensor | PaddedSequences


def _lstm(inputs: _Inputs, states: _Tensors, parameters: _Tensors, *options: Any) -> tuple[Any, ...]:
    return _run("lstm", inputs, states, parameters, *options)


def _gru(inputs: _Inputs, state: torch.Tensor, parameters: _Tensors, *options: Any) -> tuple[Any, ...]:
    return _run("gru", inputs, (state,), parameters, *options)


def _rnn_tanh(inputs: _Inputs, state: torch.Tensor, parameters: _Tensors, *options: Any) -> tuple[Any, ...]:
    return _run("rnn_tanh", inputs, (state,), parameters, *options)


def _rnn_relu(inputs: _Inputs, state: torch.Tensor, parameters: _Tensors, *options: Any) -> tuple[Any, ...]:
    return _run("rnn_relu", inputs, (state,), parameters, *options)


TRACED_INSTEAD: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _rnn_tanh,
    torch.rnn_relu: _rnn_relu,
    **PACKING,
}
"""Substitutes in a trace for torch's functions in recurrent modules, and for those that pack sequences."""


def _run(
    kind: str,
    inputs: _Inputs,
    states: _Tensors,
    parameters: _Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, ...]:
    options = (has_biases, num_layers, dropout if train else 0.0, bidirectional)
    if isinstance(inputs, PaddedSequences):
        values, *last = _run_layers(kind, inputs.values.transpose(0, 1), inputs.lengths, states, parameters, *options)
        return (inputs.of(values.transpose(0, 1)), *last)
    by_time = inputs.transpose(0, 1) if batch_first else inputs
    values, *last = _run_layers(kind, by_time, None, states, parameters, *options)
    return (values.transpose(0, 1) if batch_first else values, *last)


def _run_layers(
    kind: str,
    values: torch.Tensor,
    lengths: torch.Tensor | None,
    states: _Tensors,
    parameters: _Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    bidirectional: bool,
) -> list[torch.Tensor]:
    """Layers with dropout run one by one, so that masks depend on the graph's seed."""
    if 0 in values.shape:
        raise RuntimeError(f"Expected sequence length to be larger than 0 in RNN, got an input of {list(values.shape)}")
    device, products = values.device.type, None
    if torch.is_autocast_enabled(device) and values.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        if device == "cpu" and (kind == "gru" or (kind == "lstm" and lengths is not None)):
            dtype, products = torch.promote_types(dtype, states[0].dtype), dtype  # autocast casts for products alone
        values = values.to(dtype)
        states, parameters = [state.to(dtype) for state in states], [weight.to(dtype) for weight in parameters]
    is_recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (values, *states, *parameters))
    if dropout == 0 or num_layers == 1:
        options = (has_biases, num_layers, bidirectional, products, is_recorded)
        return recurrent(values, kind, states, parameters, lengths, *options)[: 1 + len(states)]
    each, per_layer = len(parameters) // num_layers, states[0].size(0) // num_layers
    ends: list[_Tensors] = []
    for layer in range(num_layers):
        first = [state[layer * per_layer : (layer + 1) * per_layer] for state in states]
        weights = parameters[layer * each : (layer + 1) * each]
        dropped = F.dropout(values, dropout, True) if layer else values
        options = (has_biases, 1, bidirectional, products, is_recorded)
        values, *last = recurrent(dropped, kind, first, weights, lengths, *options)
        ends.append(last[: len(states)])
    return [values, *(torch.cat([end[i] for end in ends]) for i in range(len(states)))]


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_ONE_VALUE = "a SyncBatchNorm in train mode needs more than one value per channel, and the whole batch has one"


def _synchronized(self: Any, input: torch.Tensor) -> torch.Tensor:
    self._check_input_dim(input)
    self._check_non_zero_input_channels(input)
    if not self.training and self.running_mean is not None:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
    values = input if input.dtype == torch.float64 else input.float()
    dims = [0, *range(2, input.dim())]
    shape = [1, -1] + [1] * (input.dim() - 2)
    local_count = values.new_full((1,), float(input.numel() // input.size(1)))
    sums, count = all_reduce_value(torch.cat([values.sum(dims), local_count])).split([input.size(1), 1])
    assert_true(count > 1, _ONE_VALUE)
    mean = sums / count
    centered = values - mean.view(shape)
    squares = all_reduce_value((centered * centered).sum(dims))
    if self.training and self.track_running_stats and self.running_mean is not None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            new = 1.0 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
            self.running_mean.copy_(self.running_mean * (1.0 - new) + mean.detach() * new)
            self.running_var.copy_(self.running_var * (1.0 - new) + squares.detach() / (count - 1.0) * new)
    normal = centered * torch.rsqrt(squares / count + self.eps).view(shape)
    if self.weight is not None:
        normal = normal * self.weight.view(shape)
    if self.bias is not None:
        normal = normal + self.bias.view(shape)
    return normal.to(input.dtype)


SYNCHRONIZED: Mapping[Callable[..., Any], Callable[..., Any]] = {nn.SyncBatchNorm.forward: _synchronized}
"""The substitute in a trace for the forward of `torch.nn.SyncBatchNorm`."""


def buffers_of_synchronized_norms(roots: Iterable[nn.Module]) -> set[int]:
    norms = {module for root in roots for module in root.modules() if isinstance(module, nn.SyncBatchNorm)}
    return {id(norm._buffers[name]) for norm in norms for name in _STATISTICS if norm._buffers.get(name) is not None}


def has_substitute(norm: nn.Module) -> bool:
    """False if the instance replaces its class's forward."""
    return type(norm).forward in SYNCHRONIZED and "forward" not in vars(norm)


def synchronizes(root: nn.Module) -> bool:
    norms = (module for module in root.modules() if isinstance(module, nn.SyncBatchNorm))
    return any(norm.training or norm.running_mean is None for norm in norms)
