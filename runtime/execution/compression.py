"""Runs what makes sums narrower before they are sent to other workers, or sends a part, and makes sums over workers of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.compressed_sums import own_elements, writes_for_all
from mirrorc.ir import ops
from mirrorc.ir.nodes import pack_of
from mirrorc.runtime.execution.binding import Binder, binds, binds_waits
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.state.unsent_gradients import UnsentGradients


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


@binds(ops.add_unsent)
def _bind_add_unsent(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    (bucket, pack), unsent = binder.program.packs[pack_of(node)], _unsent_of(binder)
    (start, stop), writes = own_elements(binder.program, node, replica), writes_for_all(binder.program, node, replica)
    elements = slice(pack.start + start, pack.start + stop)

    def add_unsent(own: torch.Tensor, **_: Any) -> torch.Tensor:
        return unsent.add(bucket.index, elements, own) if writes else own

    return add_unsent


@binds(ops.gather_largest)
def _bind_gather_largest(binder: Binder, replica: int, node: fx.Node) -> Callable[..., None]:
    exchanges, (bucket, pack) = binder.communicators[str(node.kwargs["link"])], binder.program.packs[pack_of(node)]
    unsent = _unsent_of(binder)

    def gather_largest(own: torch.Tensor, *, count: int, **_: Any) -> None:
        exchanges.launch_largest(pack.number, replica, unsent.new(bucket.index)[pack.start : pack.stop], count)

    return gather_largest


@binds_waits(ops.gather_largest)
def _bind_wait_for_largest(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor | None]:
    """Waits for what all workers have sent, and adds it up where the bucket's gradients lie, or in memory of its own."""
    launch: Any = node.args[0]
    exchanges, (bucket, pack) = binder.communicators[str(launch.kwargs["link"])], binder.program.packs[pack_of(node)]
    (start, stop), writes = own_elements(binder.program, node, replica), writes_for_all(binder.program, node, replica)
    own = binder.state.store.buckets[bucket.index].gradients[0][pack.start + start : pack.start + stop]
    is_needed = writes or bool(node.users)

    def wait(_pending: None, **_: Any) -> torch.Tensor | None:
        sent = exchanges.wait_largest(pack.number, replica)
        if not is_needed:
            return None
        into = own if writes else torch.empty_like(own)
        into.zero_()
        for elements, places in sent:
            if stop - start < pack.num_elements:
                is_own = (places >= start) & (places < stop)
                elements, places = elements[is_own], places[is_own] - start
            into.index_add_(0, places, elements)
        return into

    return wait


def _unsent_of(binder: Binder) -> UnsentGradients:
    """What the worker has not sent, of the state of a program that updates."""
    assert isinstance(binder.state, StepState), "programs that update nothing send nothing"
    return binder.state.unsent
