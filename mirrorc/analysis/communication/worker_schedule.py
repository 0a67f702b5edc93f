"""A worker's schedule of communication. Workers with different schedules would deadlock."""

from __future__ import annotations

import hashlib

from torch import fx

from mirrorc.analysis.communication.worker_meetings import worker_meetings
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import bucket_of, calls_to, name_of, pack_of
from mirrorc.ir.program import Program


def worker_schedule(program: Program) -> tuple[str, ...]:
    """Text lines that must be equal on all workers, without numbers of gathered rows."""
    everyone = " ".join(map(str, program.workers.devices_per_worker))
    launches = calls_to(_first_graph(program), *ops.BETWEEN_WORKERS)
    met = (meeting.line for meeting in worker_meetings(program))
    return (f"devices of workers: {everyone}", *met, *(_line(program, node) for node in launches))


def schedule_hash(program: Program) -> str:
    return hashlib.sha256("\n".join(worker_schedule(program)).encode()).hexdigest()


def _first_graph(program: Program) -> fx.Graph:
    """The verifier checks that all devices have the same exchanges."""
    return program.graphs()[0]


def _elements(bucket: Bucket, node: fx.Node) -> str:
    packs = [pack for pack in bucket.packs if pack.number == pack_of(node)]
    return "".join(f" pack {pack.number} at {pack.start} to {pack.stop}" for pack in packs)


def _line(program: Program, node: fx.Node) -> str:
    bucket = program.buckets[bucket_of(node)]
    slots = ", ".join(
        f"{slot.variable}{list(slot.shape)}{list(slot.strides)} at {slot.offset}" for slot in bucket.slots
    )
    value = node.meta.get("val")
    dtype = value.value.dtype if isinstance(value, ops.Pending) else bucket.dtype
    sent = f" as {'; '.join(map(str, bucket.sent_factors))}" if bucket.is_sent_as_factors else ""
    op = f" {node.kwargs['op']}" if "op" in node.kwargs else ""
    op += f" of {node.kwargs['count']} largest" if "count" in node.kwargs else ""
    op += f" of {node.kwargs['payload']}, {node.kwargs['num_bytes']} bytes" if "payload" in node.kwargs else ""
    return (
        f"{name_of(node)}{op} bucket {bucket.index}{_elements(bucket, node)} {dtype} {bucket.num_elements} over "
        f"{node.kwargs.get('link')} for {bucket.rule.label}: {slots}{sent}"
    )
