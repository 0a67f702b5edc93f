"""What is done with a share of a sum while its parts are made: they are measured, or bounded, before they leave the cache.

A pass over a share that lies in memory takes longer than to make the share of factors. So a wait does part by part what nodes
after it are to do with the share as a whole; these nodes find it done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.value_types import value_type
from mirrorc.runtime.communication import Communicator
from mirrorc.runtime.state.shares.deferred_tables import DeferredTables
from mirrorc.runtime.state.shares.pieces import Visit
from mirrorc.torch_internals import norms_of_each

_SMALL_ELEMENTS = 2**14


class Visitor(ABC):
    """Does to a share, part by part, what a node does to all of it.

    Attributes:
        writes: whether it changes parts.
    """

    writes: ClassVar[bool] = False

    def begin(self) -> None:  # noqa: B027 - some keep nothing
        """Called before the first part of a step's share."""

    @abstractmethod
    def visit(self, part: torch.Tensor) -> None:
        """Called with each part, 1-D, in order."""


class Looker(Visitor):
    """Looks at parts, and changes none.

    Attributes:
        found: what was seen in the large parts.
    """

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self._small: list[torch.Tensor] = []

    def begin(self) -> None:
        self.found, self._small = [], []

    def visit(self, part: torch.Tensor) -> None:
        if part.numel() <= _SMALL_ELEMENTS and not part.is_complex():
            self._small.append(part)
        else:
            self.found.append(self.look_at(part))

    @abstractmethod
    def look_at(self, part: torch.Tensor) -> torch.Tensor:
        """What is seen in a part, 0-d."""

    def take_small(self) -> list[torch.Tensor]:
        """The small parts, which are dropped here: the caller is to look at them together with those of others, because to call
        an operator for each costs more than to fetch them again."""
        small, self._small = self._small, []
        return small


class NormVisitor(Looker):
    """Measures each part.

    Args:
        norm_type: of the norm.
        dtype: of the norm.
    """

    def __init__(self, norm_type: float, dtype: torch.dtype) -> None:
        super().__init__()
        self._norm_type, self._dtype = norm_type, dtype

    def look_at(self, part: torch.Tensor) -> torch.Tensor:
        return norm_of(part, self._norm_type, self._dtype)


def norms_of_all(visitors: Sequence[NormVisitor], norm_type: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The norms of what visitors have visited, which are of this type and dtype."""
    small = [part for visitor in visitors for part in visitor.take_small()]
    return [one for visitor in visitors for one in visitor.found] + norms_of_each(small, norm_type, dtype)


def norm_of(value: torch.Tensor, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """The norm of all elements, which may be complex."""
    return torch.linalg.vector_norm(value.abs() if value.is_complex() else value, norm_type, dtype=dtype)


class SumVisitor(Looker):
    """Adds up each part, which shows whether all is finite."""

    def look_at(self, part: torch.Tensor) -> torch.Tensor:
        return sum_of(part)


def sum_of(value: torch.Tensor) -> torch.Tensor:
    """The sum of all elements, on the value's device; in more bits if those of the value would soon overflow."""
    return value.sum(dtype=_dtype_of_sum(value.dtype))


def sums_of_all(visitors: Sequence[SumVisitor]) -> list[torch.Tensor]:
    """Sums of what visitors have visited; of small parts, those of the sizes of elements."""
    small: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for part in (part for visitor in visitors for part in visitor.take_small()):
        small[part.dtype].append(part)
    found = [one for visitor in visitors for one in visitor.found]
    for dtype, parts in small.items():
        found += norms_of_each(parts, 1.0, _dtype_of_sum(dtype))
    return found


def _dtype_of_sum(dtype: torch.dtype) -> torch.dtype | None:
    return torch.float32 if dtype == torch.float16 else None


class BoundVisitor(Visitor):
    """Bounds the elements of each part, where they lie.

    Args:
        max_value: the largest absolute value.
    """

    writes = True

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

    return Visit(visit, writes=any(visitor.writes for visitor in visitors))


def visiting(
    communicator: Communicator,
    bucket: int,
    replica: int,
    visitors: Sequence[Visitor],
    deferred: DeferredTables | None = None,
) -> Callable[..., torch.Tensor]:
    """Waits for a share and lets visitors visit its parts, in their order, except for the tables that it defers."""
    visit = visit_of_all(visitors) if deferred is None else deferred.visit

    def wait(pending: Any, **_: Any) -> torch.Tensor:
        for visitor in visitors:
            visitor.begin()
        if deferred is not None:
            deferred.forget()
        return communicator.wait_and_visit(bucket, replica, pending, visit)

    return wait
