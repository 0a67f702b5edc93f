"""Mutations of what workers exchange."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Elements, SentFactors
from mirrorc.ir.nodes import bucket_of, calls_to, is_early, replica_of
from mirrorc.ir.program import Program
from mirrorc.ir.workers import Workers
from mutations.places import placed_nodes
from mutations.table import Edit, breaks


def _exchanges(graph: fx.Graph) -> list[fx.Node]:
    return list(calls_to(graph, *ops.EXCHANGES))


def _on_all(
    program: Program, edit: Callable[[fx.Node], None], targets: Sequence[object] = ops.EXCHANGES
) -> Iterator[Edit]:
    """An edit of each exchange, on all devices alike: the devices of a worker agree, and other workers do not."""

    def edit_all(place: int) -> None:
        for graph in program.graphs():
            edit(list(calls_to(graph, *targets))[place])

    for place in range(len(list(calls_to(program.graphs()[0], *targets)))):
        yield partial(edit_all, place)


def _leave_out(launch: fx.Node) -> None:
    for wait in list(launch.users):
        (own, *_) = [n for n in launch.all_input_nodes if replica_of(n) == replica_of(wait)]
        wait.replace_all_uses_with(own)
        wait.graph.erase_node(wait)
    launch.graph.erase_node(launch)


@breaks
def leave_an_exchange_out(program: Program) -> Iterator[Edit]:
    """A bucket is updated with the sum over this worker alone, on all devices."""
    yield from _on_all(program, _leave_out)


@breaks
def exchange_in_another_order(program: Program) -> Iterator[Edit]:
    """All devices of a worker launch two exchanges in another order than other workers."""

    def edit(place: int) -> None:
        for graph in program.graphs():
            one, other = pairs(graph)[place]
            other.append(one)

    def pairs(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
        return [(one, other) for one, other in pairwise(_exchanges(graph)) if all(other < user for user in one.users)]

    for place in range(len(pairs(program.graphs()[0]))):
        yield partial(edit, place)


@breaks
def exchange_twice(program: Program) -> Iterator[Edit]:
    """A bucket is exchanged and waited for once more, on all devices."""

    def edit(launch: fx.Node) -> None:
        with launch.graph.inserting_before(max(launch.users).next):
            again = launch.graph.node_copy(launch)
            for wait in launch.users:
                launch.graph.node_copy(wait, lambda node, again=again: again if node is launch else node)  # type: ignore[misc]

    yield from _on_all(program, edit)


@breaks
def update_with_this_workers_sum(program: Program) -> Iterator[Edit]:
    """What takes the sum over all workers takes that over this worker alone."""
    for launch in placed_nodes(program, *ops.EXCHANGES):
        for wait in launch.users:
            for own in launch.all_input_nodes if wait.users else ():
                if replica_of(own) == replica_of(wait):
                    yield partial(wait.replace_all_uses_with, own)


@breaks
def exchange_the_packed_bucket(program: Program) -> Iterator[Edit]:
    """A replica offers its own gradients to the other workers, not those that its worker has summed."""
    for launch in placed_nodes(program, ops.exchange) if program.num_replicas > 1 else ():
        for own in launch.all_input_nodes:
            for packed in own.all_input_nodes[0].all_input_nodes:
                if replica_of(packed) == replica_of(own):
                    yield partial(launch.replace_input_with, own, packed)


@breaks
def gather_another_bucket(program: Program) -> Iterator[Edit]:
    """A worker sends the factors of another bucket, whose gradients have another form or belong to other parameters."""
    graphs = program.graphs()
    gathered = list(calls_to(graphs[0], ops.gather_factors))

    def edit(place: int, other: int) -> None:
        for graph in graphs:
            launches = list(calls_to(graph, ops.gather_factors))
            launches[place].args = launches[other].args

    for place in range(len(gathered)):
        for other in range(place):  # what was packed before
            yield partial(edit, place, other)


@breaks
def gather_what_all_send_whole(program: Program) -> Iterator[Edit]:
    """A bucket is said to be sent as a sum by all workers, and this one gathers its factors; or the other way round."""
    launches = _exchanges(program.graphs()[0])
    for bucket in program.buckets if launches else ():
        other = () if bucket.is_sent_as_factors else (SentFactors("product", ()),) * len(bucket.slots)
        buckets = [replace(b, sent_factors=other) if b is bucket else b for b in program.buckets]
        yield partial(program.evolve, buckets=tuple(buckets))


@breaks
def wait_for_other_workers_after_the_commit(program: Program) -> Iterator[Edit]:
    """A device commits before the other workers' sums are there, one of which may have failed, and is not said to do so."""
    for launch in placed_nodes(program, *ops.EXCHANGES):
        for wait in launch.users:
            commits = [c for c in calls_to(launch.graph, ops.commit) if replica_of(c) == replica_of(wait)]
            if not is_early(commits[0]) and all(commits[0] < user for user in wait.users):
                yield partial(commits[0].append, wait)


@breaks
def commit_early_unsaid(program: Program) -> Iterator[Edit]:
    """One device's commit before the other workers' sums is not said to be early, or no device's is."""
    commits = [node for graph in program.graphs() for node in calls_to(graph, ops.commit) if is_early(node)]

    def edit(some: list[fx.Node]) -> None:
        for commit in some:
            commit.kwargs = {name: value for name, value in commit.kwargs.items() if name != "early"}

    for some in [*([commit] for commit in commits), commits] if commits else ():
        yield partial(edit, some)


@breaks
def commit_early_alone(program: Program) -> Iterator[Edit]:
    """Commits are said to be early where no worker exchanges anything."""
    commits = [node for graph in program.graphs() for node in calls_to(graph, ops.commit)]

    def edit() -> None:
        for commit in commits:
            commit.kwargs = {**commit.kwargs, "early": True}

    if commits and not _exchanges(program.graphs()[0]):
        yield edit


@breaks
def belong_to_another_worker(program: Program) -> Iterator[Edit]:
    """The program is said to be that of a worker with other devices, or of one that there is not."""
    own = program.workers
    for rank, number in enumerate((*own.devices_per_worker, 0) if own.are_several else ()):
        if number != program.num_replicas:
            yield partial(program.evolve, workers=Workers(own.devices_per_worker, rank))


@breaks
def forget_the_other_workers(program: Program) -> Iterator[Edit]:
    """The program is said to be that of a process on its own, though it exchanges."""
    if program.workers.are_several and _exchanges(program.graphs()[0]):
        yield partial(program.evolve, workers=Workers())


@breaks
def update_the_part_of_another_worker(program: Program) -> Iterator[Edit]:
    """This worker updates elements that another one updates, too, and its own stay as they were."""
    for bucket in program.buckets:
        if bucket.part is not None:
            length = bucket.part.stop - bucket.part.start
            for start in range(0, bucket.num_elements, length):
                other = replace(bucket, part=Elements(start, start + length))
                if other != bucket:
                    buckets = tuple(other if one is bucket else one for one in program.buckets)
                    yield partial(program.evolve, buckets=buckets)


@breaks
def leave_parameters_behind(program: Program) -> Iterator[Edit]:
    """A bucket keeps the parameters that this worker had, where others have updated them, on all devices."""

    def edit(launch: fx.Node) -> None:
        for wait in list(launch.users):
            launch.graph.erase_node(wait)
        launch.graph.erase_node(launch)

    yield from _on_all(program, edit, [ops.gather_parameters])


@breaks
def gather_old_parameters(program: Program) -> Iterator[Edit]:
    """Parameters are gathered before a device has updated them."""
    for launch in placed_nodes(program, ops.gather_parameters):
        for update in calls_to(launch.graph, ops.update):
            if bucket_of(update) == bucket_of(launch):
                yield partial(launch.append, update)


@breaks
def gather_parameters_in_another_order(program: Program) -> Iterator[Edit]:
    """All devices of a worker gather two buckets in another order than other workers."""

    def edit(place: int) -> None:
        for graph in program.graphs():
            one, other = list(calls_to(graph, ops.gather_parameters))[place : place + 2]
            other.append(one)

    for place in range(max(0, len(list(calls_to(program.graphs()[0], ops.gather_parameters))) - 1)):
        yield partial(edit, place)
