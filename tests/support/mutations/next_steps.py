"""Mutations of what a step leaves to the next one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import fx

from mirrorc.analysis.communication.handed_over import readers_of
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to, replica_of
from mirrorc.ir.program import Program
from mutations.places import placed_nodes
from mutations.table import Edit, breaks


@breaks
def read_what_is_not_updated_yet(program: Program) -> Iterator[Edit]:
    """A device reads parameters, or fills a bucket, before it has awaited the update that the step before has left."""
    for awaited in placed_nodes(program, ops.await_update):
        bucket = program.buckets[bucket_of(awaited)]
        for reader in readers_of(awaited.graph, bucket, replica_of(awaited)):
            yield partial(reader.append, awaited)


@breaks
def await_no_update(program: Program) -> Iterator[Edit]:
    """A device never awaits an update that the step before has left."""
    for awaited in placed_nodes(program, ops.await_update):
        yield partial(awaited.graph.erase_node, awaited)


@breaks
def await_another_update(program: Program) -> Iterator[Edit]:
    """A device awaits the update of another bucket."""

    def edit(awaited: fx.Node, bucket: int) -> None:
        awaited.kwargs = {**awaited.kwargs, "bucket": bucket}

    for awaited in placed_nodes(program, ops.await_update):
        for bucket in program.buckets:
            if bucket.index != bucket_of(awaited):
                yield partial(edit, awaited, bucket.index)


@breaks
def hand_over_twice(program: Program) -> Iterator[Edit]:
    """A device gives its caller the loss twice, or never though others do."""
    for begin in placed_nodes(program, ops.hand_over):

        def edit(begin: fx.Node = begin) -> None:
            with begin.graph.inserting_after(begin):
                begin.graph.node_copy(begin)

        yield edit
        yield partial(begin.graph.erase_node, begin)


@breaks
def hand_over_elsewhere(program: Program) -> Iterator[Edit]:
    """A device leaves more to the next step, which does not await that, or less, or gives the loss before the commit."""
    for begin in placed_nodes(program, ops.hand_over):
        own = replica_of(begin)
        for node in calls_to(begin.graph, ops.wait, ops.commit):
            if replica_of(node) == own and node < begin and _is_late_enough(node):
                yield partial(node.prepend, begin)
        for node in calls_to(begin.graph, ops.update):
            if replica_of(node) == own and node > begin:
                yield partial(node.append, begin)


def _is_late_enough(node: fx.Node) -> bool:
    """Whether what follows is another bucket's, or the commit: a wait for this worker's own sum is neither."""
    return node.target is ops.commit or any(source.target in ops.EXCHANGES for source in node.all_input_nodes)


@breaks
def write_when_handed_over(program: Program) -> Iterator[Edit]:
    """A buffer is written when the caller has the loss, and takes the buffer for written."""
    for begin in placed_nodes(program, ops.hand_over):
        for write in calls_to(begin.graph, ops.write):
            if replica_of(write) == replica_of(begin):
                yield partial(begin.append, write)
