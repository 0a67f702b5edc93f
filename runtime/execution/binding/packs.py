"""Runs `pack` and `unpack` of buckets that are cut into packs."""

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
    """The function that runs a `pack` of some elements of a bucket.

    The first pack of a device that takes a gradient copies all of it into its slot, if no region has written it there: later ones
    must not copy it again, as the elements of earlier packs may be sums by then.

    Args:
        node: the pack, in the graph of its device.
        bucket: its bucket.
        slots: the gradients' places in the device's memory.
        whole: the memory of the whole bucket.
    """
    pack = next(one for one in bucket.packs if one.number == pack_of(node))
    own = whole[pack.start : pack.stop]
    if not node.args:
        return lambda **_: own.zero_()
    place = {slot.variable: i for i, slot in enumerate(bucket.slots)}
    own_slots = [slots[place[slot.variable]] for slot in bucket.slots_in(pack)]
    to_copy = [i for i, gradient in enumerate(node.args) if not _is_copied_before(gradient, node)]

    def run(*gradients: Any, **_: Any) -> torch.Tensor:
        outside = [i for i in to_copy if gradients[i] is not own_slots[i]]
        if outside:
            copy_each([own_slots[i] for i in outside], [gradients[i] for i in outside])
        return own

    return run


def _is_copied_before(gradient: Any, pack: fx.Node) -> bool:
    """Whether an earlier pack of the device takes a gradient, too. Nothing but packs takes one, the first of them first, so that
    this ends at once where a gradient lies in many."""
    return any(other.target is ops.pack and other < pack for other in gradient.users)


def side_by_side(packs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Consecutive packs as one tensor: a view, if they lie so in one memory; otherwise their elements in new memory."""
    first = packs[0]
    end = first.data_ptr()
    for pack in packs:
        if pack.data_ptr() != end or pack.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(packs))
        end += pack.numel() * pack.itemsize
    return first.as_strided((sum(pack.numel() for pack in packs),), (1,))
