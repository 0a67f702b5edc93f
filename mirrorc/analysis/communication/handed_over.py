"""Finds which buckets a step hands over to the next one, and what of the next one must not come before their updates."""

from __future__ import annotations

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import bucket_of, calls_to, replica_of


def handed_over(graph: fx.Graph) -> dict[int, fx.Node]:
    """For each bucket whose sum is waited for behind `hand_over`, in order of these waits, the last node that belongs to it.

    In a mirrored graph these are nodes of the last replica.
    """
    begin = next(calls_to(graph, ops.hand_over), None)
    if begin is None:
        return {}
    found: dict[int, fx.Node] = {}
    for node in calls_to(graph, ops.wait, ops.update):
        if node > begin:
            found[bucket_of(node)] = node
    return found


def readers_of(graph: fx.Graph, bucket: Bucket, replica: int | None) -> list[fx.Node]:
    """What a replica does that needs the parameters of a bucket, or fills the bucket, in program order.

    Views that a region gives of parameters need not be looked at: the region comes before them.

    Args:
        graph: a mirrored or a lowered graph.
        bucket: the bucket.
        replica: the replica; None for that of a lowered graph.
    """
    names = bucket.slot_of.keys()
    given = [node for node in calls_to(graph, ops.read) if node.kwargs["variable"] in names]
    given += [node for node in calls_to(graph, ops.slot) if bucket_of(node) == bucket.index]
    found = {user for node in given if replica_of(node) == replica for user in node.users}
    packs = [node for node in calls_to(graph, ops.pack) if bucket_of(node) == bucket.index]
    return sorted({*found, *(node for node in packs if replica_of(node) == replica)})
