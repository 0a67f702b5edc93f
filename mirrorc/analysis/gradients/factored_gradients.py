"""Gradients left as factors until their bucket is packed."""

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
    """The place where a gradient is computed from its factors."""

    SHARES = "by shares at the wait"
    """Shares of the sum over all replicas."""
    GATHERED = "at the wait"
    """The whole sum over all replicas. For a table with a row-wise optimizer, only the looked-up rows."""
    PACK = "by pack"
    """Each replica's whole gradient, in its bucket."""
    AT_ONCE = "at once"
    """Each replica's whole gradient, early, for an operation other than `pack`."""


@dataclass(frozen=True)
class FactoredSlot:
    """A slot whose gradient is packed as factors. ``place`` is its index."""

    place: int
    form: GradientForm
    details: Mapping[str, Any] = field(default_factory=dict)


def stays_factored(gradient: Any) -> bool:
    """True if only `pack` uses a gradient, as factors."""
    return gradient.target in ops.FACTORED and all(user.target is ops.pack for user in gradient.users)


def is_left_to_shares(pack: fx.Node) -> bool:
    """True if every user of a pack reads factors, not the bucket."""
    return all(
        user.target in (ops.gather_factors, ops.all_gather)
        or (user.target is ops.reduce_scatter and link_named(user.kwargs["link"]).reads_shared_memory)
        for user in pack.users
    )


def factored_slots(pack: fx.Node) -> list[FactoredSlot]:
    gradients: Any = pack.args
    return [
        FactoredSlot(place, form_of(gradient), details_of(gradient))
        for place, gradient in enumerate(gradients)
        if stays_factored(gradient)
    ]


def slots_left_as_factors(program: Program, bucket: int) -> list[FactoredSlot]:
    """The `factored_slots` of a bucket of a LOWERED program, even if this worker has no examples."""
    sent = program.buckets[bucket].sent_factors
    if not sent:
        return factored_slots(pack_of_gradients(program, bucket))
    return [
        FactoredSlot(place, form_named(factors.operation), {detail.name: detail.value for detail in factors.details})
        for place, factors in enumerate(sent)
    ]


def pack_of_gradients(program: Program, bucket: int) -> fx.Node:
    graph = list(program.device_graphs.values())[program.first_present].graph
    return next(node for node in calls_to(graph, ops.pack) if bucket_of(node) == bucket)


def left_to_shares(pack: fx.Node) -> list[fx.Node]:
    """Gradients whose shares devices compute from factors, in slot order."""
    gradients: Any = pack.args
    return [gradient for gradient in gradients if stays_factored(gradient)] if is_left_to_shares(pack) else []


def factor_values(gradient: fx.Node) -> list[tuple[torch.Tensor, ...]]:
    """The factors of a gradient as fake tensors, a tuple for each microbatch."""
    factors: Any = gradient.args
    return form_of(gradient).parts([factor.meta["val"] for factor in factors])


def maker_of(gradient: fx.Node) -> Maker | None:
    """The place where a gradient is computed; None before it is packed, or before links are chosen."""
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
