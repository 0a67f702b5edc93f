"""Argument checks of torch's distributions as asserts on tensors, because a trace cannot branch on tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.distributions import Distribution, constraints, kl
from torch.distributions.utils import lazy_property

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
    return all(
        size == other or 1 in (size, other) for size, other in zip(before[::-1], batch_shape[::-1], strict=False)
    )


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
