"""`pack` and `unpack` of buckets that are cut into packs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import pack_of
from mirrorc.torch_internals import copy_each


def pack_of_cut_bucket(
    node: fx.Node, bucket: Bucket, slots: Sequence[torch.Tensor], whole: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """The first pack with elements of a gradient copies the whole gradient into its slot, unless a region has written
    it there. Later packs must not copy it again, because elements of earlier packs may be sums by then.
    """
    pack = next(candidate for candidate in bucket.packs if candidate.number == pack_of(node))
    elements = whole[pack.start : pack.stop]
    if not node.args:
        return lambda **_: elements.zero_()
    place = {slot.variable: i for i, slot in enumerate(bucket.slots)}
    pack_slots = [slots[place[slot.variable]] for slot in bucket.slots_in(pack)]
    to_copy = [i for i, gradient in enumerate(node.args) if not _is_copied_before(gradient, node)]

    def run(*gradients: Any, **_: Any) -> torch.Tensor:
        outside = [i for i in to_copy if gradients[i] is not pack_slots[i]]
        if outside:
            copy_each([pack_slots[i] for i in outside], [gradients[i] for i in outside])
        return elements

    return run


def _is_copied_before(gradient: Any, pack: fx.Node) -> bool:
    return any(other.target is ops.pack and other < pack for other in gradient.users)


def side_by_side(packs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A view if consecutive packs are adjacent in memory, else a copy."""
    first = packs[0]
    end = first.data_ptr()
    for pack in packs:
        if pack.data_ptr() != end or pack.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(packs))
        end += pack.numel() * pack.itemsize
    return first.as_strided((sum(pack.numel() for pack in packs),), (1,))
