"""What distributions of torch check of their parameters and values, as asserts on tensors: a trace cannot branch on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.distributions import Distribution, constraints, kl
from torch.distributions.utils import lazy_property

from mirrorc.torch_internals import assert_true


def _is_dependent(constraint: Any) -> bool:
    return isinstance(constraint, constraints._Dependent)


def _is_made_when_read(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name), lazy_property)


def _begin(
    self: Any,
    batch_shape: torch.Size = torch.Size(),  # noqa: B008 - as torch has it
    event_shape: torch.Size = torch.Size(),  # noqa: B008
    validate_args: bool | None = None,
) -> None:
    """`Distribution.__init__`."""
    self._batch_shape = batch_shape
    self._event_shape = event_shape
    if validate_args is not None:
        self._validate_args = validate_args
    if self._validate_args:
        for name, constraint in self.arg_constraints.items():
            if _is_dependent(constraint):
                continue
            if name not in self.__dict__ and _is_made_when_read(type(self), name):
                continue
            assert_true(
                constraint.check(getattr(self, name)).all(),
                f"the parameter {name} of a distribution {type(self).__name__} is out of its bounds",
            )
    super(Distribution, self).__init__()


def _check_value(self: Any, value: Any) -> None:
    """`Distribution._validate_sample`."""
    if not isinstance(value, torch.Tensor):
        raise ValueError("The value argument to log_prob must be a Tensor")
    first = len(value.size()) - len(self._event_shape)
    if value.size()[first:] != self._event_shape:
        raise ValueError(f"The right-most size of value must match event_shape: {value.size()} vs {self._event_shape}.")
    expected = self._batch_shape + self._event_shape
    for own, wanted in zip(reversed(value.size()), reversed(expected), strict=False):
        if own != 1 and wanted != 1 and own != wanted:
            raise ValueError(f"Value is not broadcastable with batch_shape+event_shape: {value.size()} vs {expected}.")
    assert_true(
        self.support.check(value).all(), f"a value of a distribution {type(self).__name__} is out of its support"
    )


def _kl_divergence(p: Any, q: Any) -> torch.Tensor:
    """`kl_divergence`."""
    return _divergence_of(type(p), type(q))(p, q)


def _divergence_of(kind: type, other: type) -> Callable[[Any, Any], torch.Tensor]:
    found: Any = kl._dispatch_kl(kind, other)
    return _no_divergence if found is NotImplemented else found


def _no_divergence(p: Any, q: Any) -> torch.Tensor:
    raise NotImplementedError(
        f"No KL(p || q) is implemented for p type {type(p).__name__} and q type {type(q).__name__}"
    )


VALIDATIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    constraints.is_dependent: _is_dependent,
    Distribution.__init__: _begin,
    Distribution._validate_sample: _check_value,
    kl.kl_divergence: _kl_divergence,
}
"""Functions of `torch.distributions` that look at values, with what is traced in their place."""

ASKED_OF_CLASSES: Collection[Callable[..., Any]] = (_is_made_when_read, _divergence_of)
"""Functions that those call with classes and names alone: what they give is known while they are traced."""
