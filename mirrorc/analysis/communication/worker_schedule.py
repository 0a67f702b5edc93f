"""Finds what a worker's program exchanges with the others, which must be the same on all of them, and hashes it.

Workers whose programs differ would wait for each other forever, or add up what does not belong together. They have no program in
common: each has that of its own devices. What they compare is this schedule.
"""

from __future__ import annotations

import hashlib

from torch import fx

from mirrorc.analysis.communication.worker_meetings import worker_meetings
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import bucket_of, calls_to, name_of, pack_of
from mirrorc.ir.program import Program


def worker_schedule(program: Program) -> tuple[str, ...]:
    """The worker schedule of a program: a line on who takes part, one for each meeting of all replicas that the model asks for,
    in their order, and one for each exchange, in the order of their launches.

    A line says all of an exchange that the other workers must have alike: operation, bucket, dtype, the number of elements, the
    variables with their shapes and places, the link, who updates it, and the rows of factors if these are sent. The devices of a
    worker and their shares are its own. A line on a meeting says operation, number, dtype and shape, but not how many rows are
    gathered, of which workers tell each other in each step.
    """
    everyone = " ".join(map(str, program.workers.devices_per_worker))
    launches = calls_to(_first_graph(program), *ops.BETWEEN_WORKERS)
    met = (one.line for one in worker_meetings(program))
    return (f"devices of workers: {everyone}", *met, *(_line(program, node) for node in launches))


def schedule_hash(program: Program) -> str:
    """The SHA-256 of a program's worker schedule, in hexadecimal; the same on all workers, in every process."""
    return hashlib.sha256("\n".join(worker_schedule(program)).encode()).hexdigest()


def _first_graph(program: Program) -> fx.Graph:
    """The graph of all devices, or that of the first; the verifier checks that all exchange the same."""
    return program.graphs()[0]


def _elements(bucket: Bucket, node: fx.Node) -> str:
    """The elements of a bucket that an exchange is about, if it is cut."""
    found = [pack for pack in bucket.packs if pack.number == pack_of(node)]
    return "".join(f" pack {pack.number} at {pack.start} to {pack.stop}" for pack in found)


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
