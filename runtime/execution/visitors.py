"""What is done with a share of a sum while its parts are made: they are measured, or bounded, before they leave the cache.

A pass over a share that lies in memory takes longer than to make the share of factors. So a wait does part by part what nodes
after it are to do with the share as a whole; these nodes find it done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.value_types import value_type
from mirrorc.runtime.communication import Communicator
from mirrorc.runtime.state.share_pieces import Visit


class Visitor(ABC):
    """Does to a share, part by part, what a node does to all of it."""

    def begin(self) -> None:  # noqa: B027 - some keep nothing
        """Called before the first part of a step's share."""

    @abstractmethod
    def visit(self, part: torch.Tensor) -> None:
        """Called with each part, 1-D, in order."""


class NormVisitor(Visitor):
    """Measures each part.

    Args:
        norm_type: of the norm.
        dtype: of the norm.

    Attributes:
        norms: those of the parts.
    """

    def __init__(self, norm_type: float, dtype: torch.dtype) -> None:
        self._norm_type, self._dtype = norm_type, dtype
        self.norms: list[torch.Tensor] = []

    def begin(self) -> None:
        self.norms = []

    def visit(self, part: torch.Tensor) -> None:
        self.norms.append(norm_of(part, self._norm_type, self._dtype))


def norm_of(value: torch.Tensor, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """The norm of all elements, which may be complex."""
    return torch.linalg.vector_norm(value.abs() if value.is_complex() else value, norm_type, dtype=dtype)


class SumVisitor(Visitor):
    """Adds up each part, which shows whether all is finite."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []

    def begin(self) -> None:
        self._sums = []

    def visit(self, part: torch.Tensor) -> None:
        self._sums.append(sum_of(part))

    def total(self) -> torch.Tensor:
        """The sum of all elements."""
        return torch.stack(self._sums).sum() if self._sums else torch.zeros(())


def sum_of(value: torch.Tensor) -> torch.Tensor:
    """The sum of all elements, on the value's device; in more bits if those of the value would soon overflow."""
    return value.sum(dtype=torch.float32 if value.dtype == torch.float16 else None)


class BoundVisitor(Visitor):
    """Bounds the elements of each part, where they lie.

    Args:
        max_value: the largest absolute value.
    """

    def __init__(self, max_value: float) -> None:
        self._max_value = max_value

    def visit(self, part: torch.Tensor) -> None:
        part.clamp_(-self._max_value, self._max_value)


def visitors_of(wait: fx.Node) -> dict[fx.Node, Visitor]:
    """The visitors for nodes that are to do something with a share: to look at it or, if one alone takes it, to write it."""
    found: dict[fx.Node, Visitor] = {}
    for user in wait.users:
        if user.target is ops.norm:
            found[user] = NormVisitor(float(user.kwargs["norm_type"]), value_type(user.meta["val"])[3])  # type: ignore[arg-type]
        elif user.target is ops.is_finite:
            found[user] = SumVisitor()
        elif user.target is ops.clip_value and len(wait.users) == 1:
            found[user] = BoundVisitor(float(user.kwargs["max_value"]))  # type: ignore[arg-type]
    return found


def visit_of_all(visitors: Sequence[Visitor]) -> Visit:
    """The function that has each visitor visit a part, in their order."""

    def visit(part: torch.Tensor) -> None:
        for visitor in visitors:
            visitor.visit(part)

    return visit


def visiting(
    communicator: Communicator, bucket: int, replica: int, visitors: Sequence[Visitor]
) -> Callable[..., torch.Tensor]:
    """The function that waits for a share and lets visitors visit its parts, in their order."""
    visit = visit_of_all(visitors)

    def wait(pending: Any, **_: Any) -> torch.Tensor:
        for visitor in visitors:
            visitor.begin()
        return communicator.wait_and_visit(bucket, replica, pending, visit)

    return wait
