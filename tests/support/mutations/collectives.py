"""Mutations of what is in flight: waits, launches, tags and links."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program, Stage
from mutations.places import (
    bypass,
    call_graphs,
    pairs_alike,
    placed_nodes,
    repeat,
    type_of,
    with_argument,
    with_keywords,
    without,
)
from mutations.table import Edit, breaks

_LINKS = ("shared-memory", "copy", "nccl")
_TAGGED = (ops.slot, ops.pack, *ops.LAUNCHES, ops.send, ops.wait, ops.update, ops.store)
_LINKED = (*ops.REDUCTIONS, *ops.EXCHANGES, ops.send, ops.recv)


@breaks
def drop_a_wait(program: Program) -> Iterator[Edit]:
    """A wait is left out; what used its value uses the pending one."""

    for wait in placed_nodes(program, ops.wait):
        yield partial(bypass, wait)


@breaks
def wait_twice(program: Program) -> Iterator[Edit]:
    """A wait stands there twice."""
    for wait in placed_nodes(program, ops.wait):
        yield partial(repeat, wait)  # type: ignore[arg-type]


@breaks
def wait_before_the_launch(program: Program) -> Iterator[Edit]:
    """A wait stands before the launch of what it waits for."""
    for wait in placed_nodes(program, ops.wait):
        yield partial(wait.args[0].prepend, wait)  # type: ignore[union-attr]


@breaks
def use_a_pending_value(program: Program) -> Iterator[Edit]:
    """Something takes the pending value, though a wait for it is there."""
    for wait in placed_nodes(program, ops.wait):
        for user in wait.users:
            yield partial(user.replace_input_with, wait, wait.args[0])  # type: ignore[arg-type]


@breaks
def wait_for_something_else(program: Program) -> Iterator[Edit]:
    """A wait waits for another collective of the same type."""
    for wait in placed_nodes(program, ops.wait):
        launch = wait.args[0]
        assert isinstance(launch, fx.Node)
        for other in calls_to(wait.graph, *ops.LAUNCHES):
            if other is not launch and other < wait and type_of(other) == type_of(launch):
                yield partial(with_argument, wait, 0, other)


def _exchangeable(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Reductions that follow each other, of which nobody waits for the first before the second is launched."""
    launches = list(calls_to(graph, *ops.REDUCTIONS))
    return [(one, other) for one, other in pairwise(launches) if all(other < user for user in one.users)]


@breaks
def launch_in_another_order_on_one_device(program: Program) -> Iterator[Edit]:
    """One device launches two reductions in another order than all others."""
    for module in program.device_graphs.values() if program.num_replicas > 1 else ():
        for one, other in _exchangeable(module.graph):
            yield partial(other.append, one)


@breaks
def launch_in_another_order_on_all_but_one(program: Program) -> Iterator[Edit]:
    """All devices but one launch two reductions in another order than it."""
    graphs = [module.graph for module in program.device_graphs.values()]

    def edit(left_out: int, place: int) -> None:
        for device, graph in enumerate(graphs):
            if device != left_out:
                one, other = _exchangeable(graph)[place]
                other.append(one)

    for left_out in range(len(graphs)) if len(graphs) > 1 else ():
        for place in range(len(_exchangeable(graphs[0]))):
            yield partial(edit, left_out, place)


@breaks
def wait_in_another_order_on_one_device(program: Program) -> Iterator[Edit]:
    """One device waits for two all_reduces, which all devices finish together, in another order than the others."""
    for module in program.device_graphs.values() if program.num_replicas > 1 else ():
        waits = [w for w in calls_to(module.graph, ops.wait) if w.args[0].target is ops.all_reduce]  # type: ignore[union-attr]
        for one, other in pairwise(waits):
            if other.args[0] < one:
                yield partial(one.prepend, other)


@breaks
def change_a_tag(program: Program) -> Iterator[Edit]:
    """An operation is tagged with another bucket."""
    count = len(program.buckets)
    for node in placed_nodes(program, *_TAGGED):
        other = (bucket_of(node) + 1) % count if count > 1 else count
        yield partial(with_keywords, node, bucket=other)


@breaks
def change_what_a_reduction_does(program: Program) -> Iterator[Edit]:
    """A reduction (once lowered, on one device) is another than a sum."""
    for node in placed_nodes(program, *ops.REDUCTIONS, *ops.EXCHANGES):
        for operation in ("avg", "max"):
            yield partial(with_keywords, node, op=operation)


@breaks
def change_a_link_on_one_device(program: Program) -> Iterator[Edit]:
    """A collective goes over another link on one device than on the others."""
    for module in program.device_graphs.values() if program.num_replicas > 1 else ():
        for node in calls_to(module.graph, *_LINKED):
            other = next(link for link in _LINKS if link != node.kwargs["link"])
            yield partial(with_keywords, node, link=other)


@breaks
def forget_a_link(program: Program) -> Iterator[Edit]:
    """A lowered collective names no link."""
    for module in program.device_graphs.values():
        for node in calls_to(module.graph, *_LINKED):
            yield partial(with_keywords, node, link=None)


@breaks
def name_a_link_that_cannot_be(program: Program) -> Iterator[Edit]:
    """On all devices a collective names a link that does not exist, or that joins no CPUs."""

    def edit(targets: tuple[object, ...], bucket: int, link: str) -> None:
        for node in placed_nodes(program, *targets):
            if bucket_of(node) == bucket:
                with_keywords(node, link=link)

    linked = [node for node in placed_nodes(program, *_LINKED) if node.kwargs.get("link")]
    for target, bucket in dict.fromkeys((node.target, bucket_of(node)) for node in linked):
        together = (ops.send, ops.recv) if target in (ops.send, ops.recv) else (target,)
        yield from (partial(edit, together, bucket, link) for link in ("smoke-signals", "nccl"))


@breaks
def leave_a_replica_out(program: Program) -> Iterator[Edit]:
    """A reduction of the mirrored graph joins all replicas but one."""
    for node in placed_nodes(program, *ops.REDUCTIONS) if program.graph is not None else ():
        for place in range(len(node.args)):
            yield partial(setattr, node, "args", without(node.args, place))


@breaks
def count_a_replica_twice(program: Program) -> Iterator[Edit]:
    """A reduction of the mirrored graph takes one replica's bucket in place of another's."""
    for node in placed_nodes(program, *ops.REDUCTIONS) if program.graph is not None else ():
        for place in range(len(node.args)):
            yield partial(with_argument, node, place, node.args[place - 1])


@breaks
def reduce_twice(program: Program) -> Iterator[Edit]:
    """A bucket is reduced and waited for once more, on every device, at the end."""

    def edit(place: int) -> None:
        for graph in call_graphs(program):
            launch = list(calls_to(graph, *ops.REDUCTIONS))[place]
            with graph.inserting_before(graph.output_node()):
                again = graph.node_copy(launch)
                for wait in launch.users:
                    graph.node_copy(wait, lambda node, again=again: again)  # type: ignore[misc]

    for place in range(len(list(calls_to(program.graphs()[0], *ops.REDUCTIONS)))):
        yield partial(edit, place)


@breaks
def reduce_another_bucket(program: Program) -> Iterator[Edit]:
    """Two reductions of one type are given each other's buckets, on all devices."""

    def edit(place: int) -> None:
        for graph in call_graphs(program):
            one, other = pairs(graph)[place]
            one.args, other.args = other.args, one.args
            other.prepend(one)

    def pairs(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
        found = pairs_alike(calls_to(graph, *ops.REDUCTIONS), type_of)
        return [(one, other) for one, other in found if all(other < user for user in one.users)]

    for place in range(len(pairs(program.graphs()[0])) if program.stage >= Stage.REDUCED else 0):
        yield partial(edit, place)
