"""Nodes that compress and decompress sums for other workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.communication.compressed_sums import gradients_of_pack, local_elements, writes_for_all
from mirrorc.compression import payload_named
from mirrorc.errors import ExecutionError
from mirrorc.ir import ops
from mirrorc.ir.nodes import pack_of
from mirrorc.messages.problem import problem
from mirrorc.runtime.execution.binding.binder import Binder, binds, binds_waits
from mirrorc.runtime.state.gradients.residuals import UnsentGradients
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.workers.buckets.payload import LargestElements, SentPart, SentPayload

LaunchPart = Callable[[int, int, Callable[[], SentPart]], None]
"""See `mirrorc.runtime.workers.buckets.exchanges.Exchanges.launch_part`."""


@binds(ops.compress)
def _bind_compress(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    (launch,) = node.users
    exchanges, (_, pack) = binder.exchanges(launch), binder.program.packs[pack_of(node)]
    (start, stop), writes = local_elements(binder.program, node, replica), writes_for_all(binder.program, node, replica)

    def compress(local_sum: torch.Tensor, *, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        into = exchanges.memory_to_send(pack.number, pack.num_elements, local_sum, dtype)[start:stop]
        return into.copy_(local_sum) if writes else into

    return compress


@binds(ops.decompress)
def _bind_decompress(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    bucket, pack = binder.program.packs[pack_of(node)]
    (start, stop), writes = local_elements(binder.program, node, replica), writes_for_all(binder.program, node, replica)
    into = binder.state.buckets[bucket.index].gradients[0][pack.start + start : pack.start + stop]

    def decompress(total: torch.Tensor, **_: Any) -> torch.Tensor:
        return into.copy_(total) if writes else total.to(into.dtype)

    return decompress


@binds(ops.add_unsent)
def _bind_add_unsent(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
    (bucket, pack), unsent = binder.program.packs[pack_of(node)], _unsent_of(binder)
    (start, stop), writes = local_elements(binder.program, node, replica), writes_for_all(binder.program, node, replica)
    elements = slice(pack.start + start, pack.start + stop)

    def add_unsent(local_sum: torch.Tensor, **_: Any) -> torch.Tensor:
        return unsent.add(bucket.index, elements, local_sum) if writes else local_sum

    return add_unsent


@binds(ops.gather_largest)
def _bind_gather_largest(binder: Binder, replica: int, node: fx.Node) -> Callable[..., None]:
    (bucket, pack), number = binder.program.packs[pack_of(node)], binder.program.workers.num_workers
    unsent = _unsent_of(binder)

    def launch(launch_part: LaunchPart, *, count: int, **_: Any) -> None:
        whole = unsent.new(bucket.index)[pack.start : pack.stop]
        launch_part(pack.number, replica, lambda: LargestElements(whole, count, number))

    return _launching(binder, node, launch)


@binds(ops.exchange_payload)
def _bind_exchange_payload(binder: Binder, replica: int, node: fx.Node) -> Callable[..., None]:
    (bucket, pack), number = binder.program.packs[pack_of(node)], binder.program.workers.num_workers
    unsent, text = _unsent_of(binder), str(node.kwargs["payload"])
    payload = payload_named(text)
    if payload is None:
        raise problem(
            ExecutionError,
            f"MC1507: {node.name} sends the payload {text}, which this process has not",
            "a program that was loaded is read, not run",
            f"compile the model with communication=mirrorc.Communication(compression={text})",
        )
    gradients_of = functools.partial(gradients_of_pack, bucket, pack)

    def launch(launch_part: LaunchPart, **_: Any) -> None:
        whole, (state, new) = unsent.new(bucket.index)[pack.start : pack.stop], unsent.states
        launch_part(pack.number, replica, lambda: SentPayload(payload, whole, gradients_of, state, new.update, number))

    return _launching(binder, node, launch)


def _launching(binder: Binder, node: fx.Node, launch: Callable[..., None]) -> Callable[..., None]:
    launch_part = binder.exchanges(node).launch_part
    return lambda local_sum, **words: launch(launch_part, **words)


@binds_waits(*ops.EXCHANGES_OF_PARTS)
def _bind_wait_for_parts(binder: Binder, replica: int, node: fx.Node) -> Callable[..., torch.Tensor | None]:
    """Writes the sum into the bucket's gradients; into new memory if the replica may not write there."""
    launch: Any = node.args[0]
    exchanges, (bucket, pack) = binder.exchanges(launch), binder.program.packs[pack_of(node)]
    (start, stop), writes = local_elements(binder.program, node, replica), writes_for_all(binder.program, node, replica)
    gradients = binder.state.buckets[bucket.index].gradients[0][pack.start + start : pack.start + stop]
    is_needed = writes or bool(node.users)

    def wait(_pending: None, **_: Any) -> torch.Tensor | None:
        part = exchanges.wait_part(pack.number, replica)
        if not is_needed:
            return None
        into = gradients if writes else torch.empty_like(gradients)
        part.take(start, stop, into)
        return into

    return wait


def _unsent_of(binder: Binder) -> UnsentGradients:
    assert isinstance(binder.state, StepState), "programs that update nothing send nothing"
    return binder.state.unsent
