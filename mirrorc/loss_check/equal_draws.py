"""Gives every example in all runs the random numbers of the first example in the first run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mirrorc.torch_internals import replaced_operators, schema_of

_DRAWS = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential", "exponential_", "geometric_", "log_normal_", "multinomial",
    "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random_",
    "uniform", "uniform_",
)  # fmt: skip
"""ATen operators whose results are only random numbers."""


class EqualDraws:
    def __init__(self) -> None:
        self.unequal: set[str] = set()
        self._first: list[torch.Tensor] = []
        self._place = 0

    @contextlib.contextmanager
    def replacing(self) -> Iterator[None]:
        self._place = 0
        with replaced_operators(self._replace):
            yield

    def _replace(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = operator.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in operator.tags or not _draws_now(operator, args, kwargs):
            return NotImplemented
        if operator is torch.ops.aten.native_dropout.default:
            return self._dropout(*args, **kwargs)
        drawn = operator(*args, **kwargs)
        if name not in _DRAWS or not isinstance(drawn, torch.Tensor):
            self.unequal.add(name)
            return drawn
        return self._made_equal(drawn, name)

    def _dropout(self, x: torch.Tensor, p: float, train: bool | None = True) -> tuple[torch.Tensor, torch.Tensor]:
        keep = 1.0 - p if train is not False else 1.0
        mask = self._made_equal(torch.empty_like(x, dtype=torch.bool).bernoulli_(keep), "native_dropout")
        return x * mask * (1.0 / keep if keep > 0.0 else 0.0), mask

    def _made_equal(self, drawn: torch.Tensor, name: str) -> torch.Tensor:
        example = drawn[0] if drawn.dim() and len(drawn) else drawn
        if self._place == len(self._first):
            self._first.append(example.clone())
        first = self._first[self._place]
        self._place += 1
        if first.shape == example.shape and first.dtype == example.dtype:
            drawn.copy_(first.expand_as(drawn))
        else:
            self.unequal.add(name)
        return drawn


def _draws_now(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Attention without dropout draws nothing."""
    arguments = schema_of(operator).arguments
    values = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    dropout = next((argument for argument in arguments if argument.name == "dropout_p"), None)
    return dropout is None or values.get("dropout_p", dropout.default_value) != 0.0
