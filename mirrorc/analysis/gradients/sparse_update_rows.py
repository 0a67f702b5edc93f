"""Upper bounds of the rows that a row-wise optimizer writes."""

from __future__ import annotations

from torch import fx

from mirrorc.analysis.gradients.sent_factors import rows_of
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program
from mirrorc.torch_internals import size_now


def most_rows(program: Program, index: int) -> int:
    """Upper bound of the table rows that a bucket's update writes, if other workers look up as many rows as this one."""
    bucket = program.buckets[index]
    rows_of_table = bucket.slots[0].shape[0]
    packs = [node for graph in program.graphs() for node in calls_to(graph, ops.pack) if bucket_of(node) == index]
    if not any(pack.args for pack in packs):
        return rows_of_table
    parts = [part for pack in packs for gradient in pack.all_input_nodes for part in rows_of(gradient) or []]
    looked_up = sum(size_now(part[0].shape[0]) for part in parts)
    return min(rows_of_table, program.workers.num_workers * looked_up)


def bytes_of_rows_sent(program: Program, index: int) -> int:
    """Upper bound of a table's sent bytes, without indices, because every device has them."""
    bucket = program.buckets[index]
    return most_rows(program, index) * bucket.slots[0].shape[1] * bucket.dtype.itemsize


def bytes_of_sent(program: Program, send: fx.Node) -> int:
    value = send.all_input_nodes[0]
    if value.target is ops.updated_rows:
        return bytes_of_rows_sent(program, bucket_of(value))
    tensor = value.meta["val"]
    return int(tensor.numel() * tensor.dtype.itemsize)


def is_of_rows(receipt: fx.Node) -> bool:
    return any(user.target is ops.store_rows for wait in receipt.users for user in wait.users)


def gives_indices_alone(wait: fx.Node) -> bool:
    """True for a sum of rows whose users read only the indices."""
    return all(user.target is ops.store_rows for user in wait.users)
