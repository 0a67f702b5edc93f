"""Finds the slot of a gradient, also across microbatches."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Slot
from mirrorc.ir.nodes import bucket_of, is_region_call, pack_of
from mirrorc.ir.program import Program


def slot_of(value: Any) -> fx.Node | None:
    """The slot that a value is stored in, or None.

    A region writes a gradient into one of its arguments: the variable's slot, or an earlier microbatch's gradient.
    """
    while isinstance(value, fx.Node) and value.target is not ops.slot:
        variable = gradient_of(value)
        if variable is None:
            return None
        call: Any = value.args[0]
        named = ((argument, (_slot_variable(argument), gradient_of(argument))) for argument in call.args)
        value = next((argument for argument, names in named if variable in names), None)
    return value if isinstance(value, fx.Node) else None


def gradient_of(value: Any) -> str | None:
    if not isinstance(value, fx.Node) or value.target is not operator.getitem:
        return None
    call, place = value.args
    if not isinstance(call, fx.Node) or not is_region_call(call):
        return None
    gradients: Any = call.kwargs.get("gradients") or {}
    return next((name for name, index in gradients.items() if index == place), None)


def is_partial(program: Program, gradient: fx.Node) -> bool:
    """True for a tied parameter's gradient from some of its uses. A later region adds the gradient from the others."""
    variable = gradient_of(gradient)
    if variable is None or program.microbatches:  # else each microbatch adds to the earlier ones
        return False
    return any(variable in (user.kwargs.get("gradients") or {}) for user in gradient.users if is_region_call(user))  # type: ignore[operator]


def slot_arguments(call: fx.Node) -> list[tuple[int, fx.Node]]:
    slots = ((place, slot_of(argument)) for place, argument in enumerate(call.args))
    return [(place, slot) for place, slot in slots if slot is not None]


def packed_slots(program: Program, pack: fx.Node) -> list[Slot]:
    index = bucket_of(pack)
    bucket = program.buckets[index] if 0 <= index < len(program.buckets) else None
    packs = bucket.launch_units if bucket is not None else ()
    return [slot for p in packs if p.number == pack_of(pack) and bucket for slot in bucket.slots_in(p)]


def _slot_variable(value: Any) -> str | None:
    return str(value.kwargs["variable"]) if isinstance(value, fx.Node) and value.target is ops.slot else None
