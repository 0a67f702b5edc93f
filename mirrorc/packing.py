"""Bucket plans, for ``buckets`` of `mirrorc.Communication`: groups of gradients to reduce together, and their order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

import torch

from mirrorc.messages.problem import problem


class Gradient(NamedTuple):
    """A gradient, as an argument of user-defined plans.

    Attributes:
        name: as in ``step.variables``.
        elements: the number of elements.
        ready: the index of the gradient in the order of backward.
    """

    name: str
    elements: int
    dtype: torch.dtype
    ready: int


Groups = Callable[[Sequence[Gradient]], Sequence[Sequence[str]]]
"""A user-defined plan. It takes all gradients, in the order of ``order``, and returns groups of their names. Each group
is reduced together; each gradient is in exactly one group.
"""

GradientOrder = Literal["ready", "reversed"] | Callable[[Gradient], Any]
"""The order of gradients in packs: as backward computes them, the reverse of the model's parameters, or by a key
function, smallest first.
"""

ORDERS = ("ready", "reversed")


CAP_BETWEEN_HOSTS_MB = 4.0
"""The default cap of a bucket, in MiB, over several workers on CPUs. Between hosts, bandwidth is a hundredth of that
within one memory, and nothing overlaps the last bucket of backward.
"""


@dataclass(frozen=True)
class ByBytes:
    """Packs of whole gradients up to a cap: a gradient that would exceed the cap opens the next pack.

    Attributes:
        cap_mb: the cap, in MiB; `math.inf` for one pack. A larger gradient has its own pack, or joins one that is less
            than a sixteenth full.
        first_mb: the cap of the first pack, in MiB, at most ``cap_mb``. A smaller one begins communication earlier.

    Raises:
        ValueError: a cap is not a positive number.
    """

    cap_mb: float = 25.0
    first_mb: float = 1.0

    def __post_init__(self) -> None:
        _check_cap("cap_mb", self.cap_mb)
        _check_cap("first_mb", self.first_mb)

    @property
    def caps(self) -> tuple[float, float]:
        """The caps of the first pack and of the others, in bytes."""
        first_mb = self.cap_mb if self.cap_mb == math.inf else min(self.first_mb, self.cap_mb)
        return first_mb * 2**20, self.cap_mb * 2**20


@dataclass(frozen=True)
class EqualPacks:
    """Concatenated gradients, cut into packs of equal length. A pack may end within a gradient.

    Each dtype and update rule has this many packs. Lengths include padding to cache lines. The last pack has the
    remainder.

    Attributes:
        num_packs: the number of packs; 0 for one all-reduce per gradient.

    Raises:
        TypeError, ValueError: ``num_packs`` is not an integer of at least 0.
    """

    num_packs: int

    def __post_init__(self) -> None:
        _check_number("num_packs", self.num_packs, least=0)


LEAST_ELEMENTS = 1024
"""The smallest pack of `EqualSplits`, in elements."""


@dataclass(frozen=True)
class EqualSplits:
    """Like `EqualPacks`, if worthwhile; else one all-reduce per gradient, with a remark on the reason.

    It is not worthwhile if gradients have several dtypes, or, for an update rule, if packs would have fewer than 1024
    elements (`LEAST_ELEMENTS`).

    Attributes:
        num_splits: the number of packs, at least 1.

    Raises:
        TypeError, ValueError: ``num_splits`` is not an integer of at least 1.
    """

    num_splits: int

    def __post_init__(self) -> None:
        _check_number("num_splits", self.num_splits, least=1)


def _check_number(name: str, number: Any, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"MC1001: {name} is {number!r}: give a whole number of packs")
    if number < least:
        raise ValueError(f"MC1002: {name} is {number}: give {least} or more")


Plan = ByBytes | EqualPacks | EqualSplits | Groups
Packing = float | Plan

PLANS: Mapping[str, Callable[..., Any]] = {plan.__name__: plan for plan in (ByBytes, EqualPacks, EqualSplits)}
"""Plans with a text form in pipelines, by class name."""


def _check_cap(name: str, cap_mb: Any) -> None:
    is_number = not isinstance(cap_mb, bool) and isinstance(cap_mb, Real) and not math.isnan(cap_mb)
    if not is_number or cap_mb <= 0:
        raise ValueError(f"MC1002: {name} is {cap_mb!r}: give a positive number of MiB, or math.inf for one bucket")


def plan_of(buckets: Any) -> Plan:
    """The plan for the user's ``buckets``. A number stands for `ByBytes` with this cap."""
    if isinstance(buckets, Real) and not isinstance(buckets, bool):
        _check_cap("buckets", buckets)
        return ByBytes(float(buckets))
    if isinstance(buckets, ByBytes | EqualPacks | EqualSplits) or (callable(buckets) and not isinstance(buckets, type)):
        return buckets
    fix = (
        "buckets=25, in MiB",
        "buckets=mirrorc.packing.ByBytes(cap_mb), EqualPacks(number) or EqualSplits(number)",
        "give a function that takes a list of mirrorc.packing.Gradient and returns groups of their names",
    )
    raise problem(TypeError, f"MC1001: buckets={buckets!r} is neither a size nor a way to pack", fix=fix)


def may_cut(buckets: Any) -> bool:
    """True if a plan may cut a gradient into two packs."""
    plan = plan_of(buckets)
    if isinstance(plan, EqualSplits):
        return plan.num_splits > 1
    return isinstance(plan, EqualPacks) and plan.num_packs > 1


def check_order(order: Any) -> None:
    allowed = "say 'ready', as backward makes them, 'reversed', or give a key function of a mirrorc.packing.Gradient"
    if isinstance(order, str) and order not in ORDERS:
        raise ValueError(f"MC1002: order is {order!r}: {allowed}")
    if not isinstance(order, str) and (isinstance(order, type) or not callable(order)):
        raise TypeError(f"MC1001: order is {order!r}: {allowed}")


def in_order(gradients: Sequence[Gradient], order: GradientOrder, registered: Sequence[str]) -> list[Gradient]:
    """The gradients in the user's order, from that of backward. ``registered`` are the parameters in the model's order."""
    if order == "ready":
        return list(gradients)
    if order == "reversed":
        place = {name: i for i, name in enumerate(registered)}
        return sorted(gradients, key=lambda gradient: -place[gradient.name])
    assert callable(order)
    try:
        keys = [order(gradient) for gradient in gradients]
    except Exception as error:
        raise _of_the_users("order", "takes a", error) from error
    for gradient, key in zip(gradients, keys, strict=True):
        if why := _why_no_key(key):
            raise ValueError(f"MC1506: order gives {why} for {gradient.name!r}: give numbers, texts or tuples of them")
    try:
        return [gradient for _, gradient in sorted(zip(keys, gradients, strict=True), key=lambda pair: pair[0])]
    except Exception as error:
        fix = "give numbers, texts or tuples of them"
        raise problem(ValueError, "MC1506: order gives keys that cannot be compared", str(error), fix) from error


def _why_no_key(key: Any) -> str:
    if isinstance(key, torch.Tensor):
        return f"a tensor ({list(key.shape)}, {key.dtype})"
    if isinstance(key, float) and math.isnan(key):
        return "nan"
    return next(filter(None, map(_why_no_key, key)), "") if isinstance(key, tuple) else ""


def groups_of(groups: Groups, gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    """The groups of a user-defined plan, checked: each gradient is in one, and each has gradients of one dtype."""
    plan = f"buckets={getattr(groups, '__name__', type(groups).__name__)}"
    try:
        named_groups = groups(list(gradients))
    except Exception as error:
        raise _of_the_users(plan, "takes a list of", error) from error
    if not _is_list(named_groups) or not all(map(_is_list, named_groups)):
        raise TypeError(f"MC1506: {plan} gives {named_groups!r:.200}: give a list of lists of names")
    by_name = {gradient.name: gradient for gradient in gradients}
    names = [name for group in named_groups for name in group]
    if unknown := [name for name in names if not isinstance(name, str) or name not in by_name]:
        fix = f"use names of gradients: {', '.join(by_name)}"
        raise problem(ValueError, f"MC1506: {plan} names {unknown[0]!r}, which has no gradient", fix=fix)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise problem(
            ValueError, f"MC1506: {plan} has {twice[0]!r} in two places", "a gradient is reduced once", "name it once"
        )
    if missing := [name for name in by_name if name not in set(names)]:
        why = "each gradient is in exactly one"
        fix = f"add the group [{missing[0]!r}]"
        raise problem(ValueError, f"MC1506: {plan} puts {missing[0]!r} into no group", why, fix)
    resolved = [[by_name[name] for name in group] for group in named_groups]
    for group in resolved:
        dtypes = list(dict.fromkeys(gradient.dtype for gradient in group))
        if not dtypes:
            raise problem(ValueError, f"MC1506: {plan} gives an empty group", fix="leave that group out")
        if len(dtypes) > 1:
            first = [next(gradient.name for gradient in group if gradient.dtype is dtype) for dtype in dtypes[:2]]
            raise problem(
                ValueError,
                f"MC1506: {plan} puts {first[0]!r} ({dtypes[0]}) and {first[1]!r} ({dtypes[1]}) in one group",
                "a pack has one dtype",
                "make a group for each dtype",
            )
    return resolved


def _of_the_users(option: str, takes: str, error: Exception) -> ValueError:
    return problem(
        ValueError,
        f"MC1506: {option}: your function raised {type(error).__name__}: {error}",
        f"it {takes} mirrorc.packing.Gradient, which has the fields {', '.join(Gradient._fields)}",
        "mend that function: the traceback above has its line",
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def equal_ranges(num_elements: int, number: int) -> list[tuple[int, int]]:
    """Cuts elements into at most ``number`` equal ranges [start, stop); the last has the remainder."""
    size = max(1, num_elements // number)
    starts = [i * size for i in range(min(number, num_elements))]
    return list(zip(starts, [*starts[1:], num_elements], strict=True))
