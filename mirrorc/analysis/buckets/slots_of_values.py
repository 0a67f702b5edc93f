"""Finds the slots in whose memory gradients lie, over the microbatches that add to them one after the other."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Slot
from mirrorc.ir.nodes import bucket_of, is_region_call, pack_of
from mirrorc.ir.program import Program


def slot_of(value: Any) -> fx.Node | None:
    """The slot in whose memory a value lies: itself, or that which the region that gives it has written; None if there is none.

    A region gives a gradient in the memory that it is given for this variable: in the slot, or in the gradient of an earlier
    microbatch, or in the part of the gradient that an earlier region gives, which lie there already.
    """
    while isinstance(value, fx.Node) and value.target is not ops.slot:
        variable = gradient_of(value)
        if variable is None:
            return None
        call: Any = value.args[0]
        value = next((given for given in call.args if variable in (_slot_variable(given), gradient_of(given))), None)
    return value if isinstance(value, fx.Node) else None


def gradient_of(value: Any) -> str | None:
    """The variable whose gradient a region gives as this value; None if it is none."""
    if not isinstance(value, fx.Node) or value.target is not operator.getitem:
        return None
    call, place = value.args
    if not isinstance(call, fx.Node) or not is_region_call(call):
        return None
    gradients: Any = call.kwargs.get("gradients") or {}
    return next((name for name, index in gradients.items() if index == place), None)


def given_slots(call: fx.Node) -> list[tuple[int, fx.Node]]:
    """The arguments of a region's call that lie in slots: their places, and the slots."""
    found = ((place, slot_of(given)) for place, given in enumerate(call.args))
    return [(place, slot) for place, slot in found if slot is not None]


def packed_slots(program: Program, pack: fx.Node) -> list[Slot]:
    """The slots whose gradients a `pack` takes, in order; none if there is no such pack."""
    index = bucket_of(pack)
    bucket = program.buckets[index] if 0 <= index < len(program.buckets) else None
    packs = bucket.own_packs if bucket is not None else ()
    return [slot for one in packs if one.number == pack_of(pack) and bucket for slot in bucket.slots_in(one)]


def _slot_variable(value: Any) -> str | None:
    return str(value.kwargs["variable"]) if isinstance(value, fx.Node) and value.target is ops.slot else None
