"""Measures or bounds the parts of a share while they are in cache."""

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
    """Runs a node on a share, part by part. ``writes``: it changes the parts."""

    writes: ClassVar[bool] = False

    def begin(self) -> None:  # noqa: B027 - some keep nothing
        pass

    @abstractmethod
    def visit(self, part: torch.Tensor) -> None:
        pass


class Looker(Visitor):
    def __init__(self, look_at: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._look_at = look_at
        self.results: list[torch.Tensor] = []
        self._small: list[torch.Tensor] = []

    def begin(self) -> None:
        self.results, self._small = [], []

    def visit(self, part: torch.Tensor) -> None:
        if part.numel() <= _SMALL_ELEMENTS and not part.is_complex():
            self._small.append(part)
        else:
            self.results.append(self._look_at(part))

    def take_small(self) -> list[torch.Tensor]:
        """Takes the small parts, so that one operator call serves several visitors."""
        small, self._small = self._small, []
        return small


class NormVisitor(Looker):
    def __init__(self, norm_type: float, dtype: torch.dtype) -> None:
        super().__init__(lambda part: norm_of(part, norm_type, dtype))


def norms_of_all(visitors: Sequence[NormVisitor], norm_type: float, dtype: torch.dtype) -> list[torch.Tensor]:
    small = [part for visitor in visitors for part in visitor.take_small()]
    return [norm for visitor in visitors for norm in visitor.results] + norms_of_each(small, norm_type, dtype)


def norm_of(value: torch.Tensor, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.linalg.vector_norm(value.abs() if value.is_complex() else value, norm_type, dtype=dtype)


class SumVisitor(Looker):
    def __init__(self) -> None:
        super().__init__(sum_of)


def sum_of(value: torch.Tensor) -> torch.Tensor:
    return value.sum(dtype=_dtype_of_sum(value.dtype))


def sums_of_all(visitors: Sequence[SumVisitor]) -> list[torch.Tensor]:
    """Sums of the visited parts. Small parts have sums of absolute values."""
    small: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for part in (part for visitor in visitors for part in visitor.take_small()):
        small[part.dtype].append(part)
    totals = [total for visitor in visitors for total in visitor.results]
    for dtype, parts in small.items():
        totals += norms_of_each(parts, 1.0, _dtype_of_sum(dtype))
    return totals


def _dtype_of_sum(dtype: torch.dtype) -> torch.dtype | None:
    return torch.float32 if dtype == torch.float16 else None


class BoundVisitor(Visitor):
    writes = True

    def __init__(self, max_value: float) -> None:
        self._max_value = max_value

    def visit(self, part: torch.Tensor) -> None:
        part.clamp_(-self._max_value, self._max_value)


def visitors_of(wait: fx.Node) -> dict[fx.Node, Visitor]:
    """Visitors for norms and finite checks of a wait's share; for a clip by value if nothing else reads the share."""
    visitors: dict[fx.Node, Visitor] = {}
    for user in wait.users:
        if user.target is ops.norm:
            visitors[user] = NormVisitor(float(user.kwargs["norm_type"]), value_type(user.meta["val"])[3])  # type: ignore[arg-type]
        elif user.target is ops.is_finite:
            visitors[user] = SumVisitor()
        elif user.target is ops.clip_value and len(wait.users) == 1:
            visitors[user] = BoundVisitor(float(user.kwargs["max_value"]))  # type: ignore[arg-type]
    return visitors


def visit_of_all(visitors: Sequence[Visitor]) -> Visit:
    def visit(part: torch.Tensor) -> None:
        for visitor in visitors:
            visitor.visit(part)

    return Visit(visit, writes=any(visitor.writes for visitor in visitors))


def visiting(
    communicator: Communicator, bucket: int, replica: int, visitors: Sequence[Visitor], deferred: DeferredTables | None
) -> Callable[..., torch.Tensor]:
    """A function that waits for a share. Visitors process its parts in order, except for deferred tables."""
    visit = visit_of_all(visitors) if deferred is None else deferred.visit

    def wait(pending: Any, **_: Any) -> torch.Tensor:
        for visitor in visitors:
            visitor.begin()
        if deferred is not None:
            deferred.forget()
        return communicator.wait_and_visit(bucket, replica, pending, visit)

    return wait
