"""Finds which gradients stay factors until their bucket is packed, and where the whole gradient is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.gradient_forms import GradientForm, details_of, form_named, form_of
from mirrorc.ir.links import link_named
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program


class Maker(Enum):
    """Where a gradient is made from its factors."""

    SHARES = "by shares at the wait"
    """When a device waits for the bucket, it makes its share of the sum over all replicas."""
    GATHERED = "at the wait"
    """When a device waits for the bucket, it makes the sum over all replicas for itself; of a table whose optimizer takes rows,
    those that any of them has looked up."""
    PACK = "by pack"
    """Each replica makes its own whole gradient in its bucket."""
    AT_ONCE = "at once"
    """Each replica makes its own whole gradient early, because an operation other than `pack` uses it."""


@dataclass(frozen=True)
class FactoredSlot:
    """A slot whose gradient is packed as factors.

    Attributes:
        place: its number among the bucket's slots; the slot is contiguous.
        form: how the gradient is made of the factors.
        details: what else it depends on, by the keywords of the form's operation.
    """

    place: int
    form: GradientForm
    details: Mapping[str, Any] = field(default_factory=dict)


def stays_factored(gradient: Any) -> bool:
    """Whether a gradient stays factors up to its `pack`, which is the only operation that uses it."""
    return gradient.target in ops.FACTORED and all(user.target is ops.pack for user in gradient.users)


def is_left_to_shares(pack: fx.Node) -> bool:
    """Whether every use of a packed bucket makes its sum, or shares of that, in the memory that the replicas share or from
    gathered factors."""
    return all(
        user.target in (ops.gather_factors, ops.all_gather)
        or (user.target is ops.reduce_scatter and link_named(user.kwargs["link"]).reads_one_memory)
        for user in pack.users
    )


def factored_slots(pack: fx.Node) -> list[FactoredSlot]:
    """The slots of a packed bucket whose gradients are packed as factors."""
    gradients: Any = pack.args
    return [
        FactoredSlot(place, form_of(gradient), details_of(gradient))
        for place, gradient in enumerate(gradients)
        if stays_factored(gradient)
    ]


def slots_left_as_factors(program: Program, bucket: int) -> list[FactoredSlot]:
    """The slots of a bucket whose gradients are packed as factors, in a LOWERED program; this worker may have no examples."""
    sent = program.buckets[bucket].sent_factors
    if not sent:
        return factored_slots(pack_of_gradients(program, bucket))
    return [
        FactoredSlot(place, form_named(one.operation), {detail.name: detail.value for detail in one.details})
        for place, one in enumerate(sent)
    ]


def pack_of_gradients(program: Program, bucket: int) -> fx.Node:
    """The pack of a bucket on the first device of a LOWERED program that has gradients: all that have any pack the same ones."""
    graph = list(program.device_graphs.values())[program.first_present].graph
    return next(node for node in calls_to(graph, ops.pack) if bucket_of(node) == bucket)


def left_to_shares(pack: fx.Node) -> list[fx.Node]:
    """The gradients of a packed bucket whose shares the devices make from factors, in order of their slots."""
    gradients: Any = pack.args
    return [gradient for gradient in gradients if stays_factored(gradient)] if is_left_to_shares(pack) else []


def factor_values(gradient: fx.Node) -> list[tuple[torch.Tensor, ...]]:
    """The (fake) tensors of a gradient's factors, of each of its parts."""
    factors: Any = gradient.args
    return form_of(gradient).parts([factor.meta["val"] for factor in factors])


def maker_of(gradient: fx.Node) -> Maker | None:
    """Where a factored gradient is made whole; None as long as the gradient is not packed or no link is chosen."""
    users = list(gradient.users)
    if any(user.op == "output" for user in users):
        return None
    if not stays_factored(gradient):
        return Maker.AT_ONCE
    takers = [taker for pack in users for taker in pack.users]
    if any(
        taker.op == "output"
        or ((taker.target in ops.REDUCTIONS or taker.target in ops.EXCHANGES) and not taker.kwargs.get("link"))
        for taker in takers
    ):
        return None
    if any(taker.target is ops.all_gather for taker in takers):
        return Maker.GATHERED
    return Maker.SHARES if all(map(is_left_to_shares, users)) else Maker.PACK
