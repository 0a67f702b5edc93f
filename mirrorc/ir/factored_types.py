"""Type rules of the operations that give a gradient as factors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from mirrorc.ir.program import Program
from mirrorc.ir.type_rules import noted_type, of_slot
from mirrorc.ir.value_types import ValueType, say_type


def of_product(program: Program, node: fx.Node) -> ValueType:
    """The type of the slot, which must be that of the product of each pair of matrices."""
    slot = of_slot(program, node)
    for factors in _pairs(node, "multiplies", slot):
        shapes = [kind[1] for kind in factors if isinstance(kind, tuple) and kind[0] == "tensor" and kind[3] == slot[3]]
        if len(shapes) != 2 or [len(shape) for shape in shapes] != [2, 2] or shapes[0][1] != shapes[1][0]:
            given = " and ".join(say_type(kind) for kind in factors)
            raise TypeError(f"it multiplies {given}: it needs two matrices of {say_type(slot)} that fit each other")
        if (shapes[0][0], shapes[1][1]) != slot[1]:
            raise TypeError(f"its product is {[shapes[0][0], shapes[1][1]]}, but the slot is {say_type(slot)}")
    return slot


def of_index_add(program: Program, node: fx.Node) -> ValueType:
    """The type of the slot. Each pair must have rows of the slot's width, and then an index for each row."""
    slot = of_slot(program, node)
    for factors in _pairs(node, "adds", slot):
        given = [kind for kind in factors if isinstance(kind, tuple) and kind[0] == "tensor"]
        fits = len(given) == 2 and given[1][3] in (torch.int32, torch.int64) and given[0][3] == slot[3]
        if not fits or given[0][1] != (*given[1][1], *slot[1][1:]) or len(slot[1]) != 2:
            said = " at ".join(say_type(kind) for kind in factors)
            raise TypeError(
                f"it adds {said}: it needs rows of {say_type(slot)}, and as many integers that name their places"
            )
    return slot


def _pairs(node: fx.Node, what: str, slot: ValueType) -> Iterator[tuple[ValueType, ValueType]]:
    kinds = [noted_type(factor) for factor in node.args]
    if not kinds or len(kinds) % 2:
        given = ", ".join(say_type(kind) for kind in kinds) or "nothing"
        raise TypeError(f"it {what} {given}: it needs a pair of factors of {say_type(slot)} for each microbatch")
    return zip(kinds[::2], kinds[1::2], strict=True)
