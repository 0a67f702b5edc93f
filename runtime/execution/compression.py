"""Runs what makes sums narrower before they are sent to other workers, and what makes the sums over workers wide again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.compressed_sums import own_elements, writes_for_all
from mirrorc.ir import ops
from mirrorc.ir.nodes import pack_of
from mirrorc.runtime.execution.binding import Binder, binds


@binds(ops.compress)
def _bind_compress(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    (launch,) = node.users
    exchanges, (_, pack) = binder.communicators[str(launch.kwargs["link"])], binder.program.packs[pack_of(node)]
    (start, stop), writes = own_elements(binder.program, node, replica), writes_for_all(binder.program, node, replica)

    def compress(own: torch.Tensor, *, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        into = exchanges.memory_to_send(pack.number, pack.num_elements, own, dtype)[start:stop]
        return into.copy_(own) if writes else into

    return compress


@binds(ops.decompress)
def _bind_decompress(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    bucket, pack = binder.program.packs[pack_of(node)]
    (start, stop), writes = own_elements(binder.program, node, replica), writes_for_all(binder.program, node, replica)
    into = binder.state.store.buckets[bucket.index].gradients[0][pack.start + start : pack.start + stop]

    def decompress(total: torch.Tensor, **_: Any) -> torch.Tensor:
        return into.copy_(total) if writes else total.to(into.dtype)

    return decompress
