"""Mutations of what is written, and when."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.variables import Placement, Synchronization
from mutations.places import (
    exchange_args,
    is_value,
    next_like,
    pairs_alike,
    placed_nodes,
    region_calls,
    repeat,
    timelines,
    type_of,
    variables_read,
    with_argument,
    with_bucket,
    with_keywords,
)
from mutations.table import Edit, breaks

_UPDATES = (ops.update, ops.step_optimizer, ops.store, ops.store_rows)


def _buckets_of(node: fx.Node) -> tuple[int, ...]:
    return node.kwargs["buckets"] if node.target is ops.step_optimizer else (bucket_of(node),)  # type: ignore[return-value]


def _erase(node: fx.Node) -> None:
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)


@breaks
def drop_an_update(program: Program) -> Iterator[Edit]:
    """A replica's parameters are not updated, or not stored."""
    for node in placed_nodes(program, ops.update, ops.store, ops.store_rows):
        yield partial(node.graph.erase_node, node)
    for node in placed_nodes(program, ops.step_optimizer):
        yield partial(_erase, node)


@breaks
def drop_a_commit(program: Program) -> Iterator[Edit]:
    """A replica does not commit, so that others wait for it in vain."""
    for node in placed_nodes(program, ops.commit):
        if not node.users:
            yield partial(node.graph.erase_node, node)


@breaks
def commit_twice(program: Program) -> Iterator[Edit]:
    """A replica commits twice."""
    for node in placed_nodes(program, ops.commit):
        yield partial(repeat, node)  # type: ignore[arg-type]


def _of_the_same_replica(program: Program, commit: fx.Node, *operations: object) -> list[fx.Node]:
    nodes = placed_nodes(program, *operations)
    return [node for node in nodes if node.graph is commit.graph and replica_of(node) == replica_of(commit)]


@breaks
def commit_too_early(program: Program) -> Iterator[Edit]:
    """A replica commits before its last pack, after which something may still fail."""
    for commit in placed_nodes(program, ops.commit):
        for pack in _of_the_same_replica(program, commit, ops.pack)[-1:]:
            yield partial(pack.prepend, commit)


@breaks
def commit_too_late(program: Program) -> Iterator[Edit]:
    """A replica commits after its first update, which a failure of another one cannot undo."""
    for commit in placed_nodes(program, ops.commit):
        for update in _of_the_same_replica(program, commit, *_UPDATES)[:1]:
            yield partial(update.append, commit)


@breaks
def update_twice(program: Program) -> Iterator[Edit]:
    """A replica's parameters are updated, or stored, twice."""
    for node in placed_nodes(program, *_UPDATES):
        yield partial(repeat, node)  # type: ignore[arg-type]


@breaks
def update_from_another_sum(program: Program) -> Iterator[Edit]:
    """A bucket is updated from the sum of another bucket of its type."""
    for timeline in timelines(program):
        sums = [node for node in timeline if node.target in (ops.wait, ops.pack)]
        for node in (n for n in timeline if n.target in (ops.update, ops.step_optimizer)):
            for place, given in enumerate(node.all_input_nodes):
                if "bucket" not in given.kwargs:  # it is scaled, of which `clipping` has mutations
                    continue
                other = next_like(given, [n for n in sums if n < node and bucket_of(n) != bucket_of(given)])
                if other is not None:
                    yield partial(with_argument, node, place, other)


@breaks
def update_from_an_unreduced_bucket(program: Program) -> Iterator[Edit]:
    """A replica's update takes its own gradients in place of their sum; before there are updates, the output names them."""
    for timeline in timelines(program):
        packs = {bucket_of(node): node for node in timeline if node.target is ops.pack}
        for wait in (node for node in timeline if node.target is ops.wait):
            if wait.args[0].target in ops.REDUCTIONS:  # type: ignore[union-attr]
                for user in wait.users:
                    yield partial(user.replace_input_with, wait, packs[bucket_of(wait)])


@breaks
def update_before_a_later_read(program: Program) -> Iterator[Edit]:
    """A variable is written as soon as may be, before a region that reads it, itself or through a view that it was given."""

    def edit(writer: fx.Node, wait: fx.Node | None, reader: fx.Node) -> None:
        for node in (wait, writer):
            if node is not None and not node < reader:
                reader.prepend(node)

    for timeline in timelines(program):
        writers = [node for node in timeline if _variables_written(program, node) and len(node.all_input_nodes) == 1]
        reads = variables_read(program, timeline) if writers else {}
        for writer in writers:
            (given,) = writer.all_input_nodes
            needed = given.all_input_nodes if given.target is ops.wait else [given]
            for reader, names in reads.items():
                is_read = names & _variables_written(program, writer) and reader < writer
                if is_read and all(node < reader for node in needed):
                    yield partial(edit, writer, given if given.target is ops.wait else None, reader)


def _variables_written(program: Program, node: fx.Node) -> set[str]:
    if node.target is ops.write:
        return {str(node.kwargs["variable"])}
    if node.target not in _UPDATES:
        return set()
    return {slot.variable for index in _buckets_of(node) for slot in program.buckets[index].slots}


@breaks
def write_shared_parameters_too_early(program: Program) -> Iterator[Edit]:
    """A device, or all, update shared parameters before they know that the others have read them."""

    def edit(moved: list[tuple[fx.Node, fx.Node]]) -> None:
        for wait, update in moved:
            first = next(n for n in wait.graph.nodes if n.target is ops.wait)
            for node in (wait, update):
                if node is not first:
                    first.prepend(node)

    if program.stage < Stage.SCHEDULED:
        return
    for bucket in program.buckets:
        found = []
        for timeline in timelines(program):
            last_region = max(region_calls(timeline), default=None)
            for update in (n for n in timeline if n.target is ops.update and _buckets_of(n) == (bucket.index,)):
                wait = update.all_input_nodes[0]
                is_early = last_region is not None and wait.all_input_nodes[0] < last_region
                if is_early and bucket.placement is Placement.SHARED:
                    found.append((wait, update))
        yield from (partial(edit, [pair]) for pair in found)
        if found:
            yield partial(edit, found)


@breaks
def step_on_other_buckets(program: Program) -> Iterator[Edit]:
    """The optimizer that runs by itself is given sums in another order than it is told, or fewer."""
    for node in placed_nodes(program, ops.step_optimizer):
        if len(node.args) > 1:
            yield partial(with_keywords, node, buckets=_buckets_of(node)[::-1])
            yield partial(setattr, node, "args", node.args[1:] + node.args[:1])
            yield partial(setattr, node, "args", node.args[:-1])
            yield partial(with_keywords, node, buckets=_buckets_of(node)[:-1])
            yield partial(with_argument, node, len(node.args) - 1, node.args[0])


@breaks
def let_another_replica_step(program: Program) -> Iterator[Edit]:
    """The optimizer that runs by itself, which holds replica 0's parameters, runs for another replica and is sent from there."""

    def edit(step: fx.Node) -> None:
        own = {(bucket_of(n), replica_of(n)): n for n in placed_nodes(program, ops.wait, ops.store)}
        sums = [n for n in placed_nodes(program, ops.wait) if n.args[0].target in ops.REDUCTIONS]  # type: ignore[union-attr]
        given = {(bucket_of(n), replica_of(n)): n for n in sums}
        step.args = tuple(given[(index, 1)] for index in _buckets_of(step))
        last = max(step.all_input_nodes)
        if step < last:
            last.append(step)
        with_keywords(step, replica=1)
        for node in [user for part in step.users for user in part.users]:
            with_keywords(node, root=1)
            waits = {replica_of(wait): wait for wait in node.users}
            store = own[(bucket_of(node), 1)]
            store.args = (waits[0],)
            with_keywords(store, replica=0)

    for step in placed_nodes(program, ops.step_optimizer):
        is_broadcast = [user.target is ops.broadcast for part in step.users for user in part.users]
        if is_broadcast and all(is_broadcast) and program.stage is Stage.UPDATED:
            yield partial(edit, step)


@breaks
def update_without_a_share(program: Program) -> Iterator[Edit]:
    """A device that has no share of a small bucket updates it, too."""

    def edit(wait: fx.Node) -> None:
        kwargs = {key: value for key, value in wait.kwargs.items() if key in ("bucket", "replica")}
        with wait.graph.inserting_after(wait):
            wait.graph.call_function(ops.update, (wait,), kwargs)

    for wait in placed_nodes(program, ops.wait):
        if not wait.users and wait.args[0].target in ops.SHARED_OUT:  # type: ignore[union-attr]
            yield partial(edit, wait)


@breaks
def leave_out_an_argument(program: Program) -> Iterator[Edit]:
    """An operation is given nothing."""
    given = (ops.pack, *ops.COLLECTIVES, ops.send, ops.wait, ops.write, *_UPDATES)
    for node in placed_nodes(program, *given):
        if node.args:
            yield partial(setattr, node, "args", ())


@breaks
def drop_a_write(program: Program) -> Iterator[Edit]:
    """A replica's buffer keeps its old value."""
    for node in placed_nodes(program, ops.write):
        yield partial(node.graph.erase_node, node)


@breaks
def write_to_another_variable(program: Program) -> Iterator[Edit]:
    """A replica writes one buffer's new value to another."""
    own = [v for v in program.variables.values() if v.synchronization is Synchronization.PER_REPLICA]
    for node in placed_nodes(program, ops.write):
        variable = program.variables[str(node.kwargs["variable"])]
        alike = [v.name for v in own if v != variable and (v.shape, v.dtype) == (variable.shape, variable.dtype)]
        yield from (partial(with_keywords, node, variable=name) for name in alike[:1])


@breaks(is_judged=True)
def write_another_value(program: Program) -> Iterator[Edit]:
    """A replica writes another value of that type to a buffer."""
    for timeline in timelines(program):
        values = [node for node in timeline if is_value(node)]
        for node in (n for n in timeline if n.target is ops.write):
            other = next_like(node.all_input_nodes[0], [value for value in values if value < node])
            if other is not None:
                yield partial(with_argument, node, 0, other)


@breaks
def exchange_two_writes(program: Program) -> Iterator[Edit]:
    """Two buffers of one type get each other's new values."""

    for timeline in timelines(program):
        writes = [node for node in timeline if node.target is ops.write]
        for one, other in pairs_alike(writes, lambda node: type_of(node.all_input_nodes[0])):
            yield partial(exchange_args, one, other)


@breaks
def change_a_placement(program: Program) -> Iterator[Edit]:
    """A bucket's parameters are said to be shared, or left to an owner, when they are not, or the other way round."""
    other = dict(zip(Placement, [*list(Placement)[1:], Placement.MIRRORED], strict=True))
    is_told = program.stage >= Stage.SCHEDULED and program.num_replicas > 1 and program.updates
    for bucket in program.buckets if is_told else ():
        yield partial(with_bucket, program, bucket.index, placement=other[bucket.placement])


@breaks
def change_an_owner(program: Program) -> Iterator[Edit]:
    """A bucket is said to have another owner than the device that updates it."""
    for bucket in program.buckets if program.stage >= Stage.SCHEDULED and program.updates else ():
        if bucket.has_owner and bucket.owner is not None:
            yield partial(with_bucket, program, bucket.index, owner=(bucket.owner + 1) % program.num_replicas)


@breaks
def copy_before_the_update(program: Program) -> Iterator[Edit]:
    """A device sends parameters that it owns before it has updated them."""
    for timeline in timelines(program):
        updates = {bucket_of(node): node for node in timeline if node.target is ops.update}
        for node in (n for n in timeline if n.target is ops.updated):
            yield partial(updates[bucket_of(node)].prepend, node)


@breaks
def reduce_to_another_device(program: Program) -> Iterator[Edit]:
    """The sum of a bucket goes to a device that does not own it."""
    for node in placed_nodes(program, ops.reduce):
        yield partial(with_keywords, node, root=(node.kwargs["root"] + 1) % program.num_replicas)  # type: ignore[operator]


@breaks
def scale_a_sum(program: Program) -> Iterator[Edit]:
    """A sum is multiplied before it is used: a learning rate of its own for one replica's bucket."""

    def edit(wait: fx.Node) -> None:
        with wait.graph.inserting_after(wait):
            scaled = wait.graph.call_function(torch.ops.aten.mul.Tensor, (wait, 2.0))
        scaled.meta["val"] = wait.meta["val"]
        wait.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)

    for wait in placed_nodes(program, ops.wait):
        if any(user.target in _UPDATES for user in wait.users):
            yield partial(edit, wait)


@breaks
def update_by_another_rule(program: Program) -> Iterator[Edit]:
    """A bucket and its variables agree on an update rule that is not the one they were captured with."""

    def edit(index: int) -> Program:
        bucket = program.buckets[index]
        rule = replace(bucket.rule, group=bucket.rule.group + 1)
        own = {slot.variable for slot in bucket.slots}
        variables = {name: replace(v, update=rule) if name in own else v for name, v in program.variables.items()}
        return with_bucket(program, index, rule=rule).evolve(variables=variables)

    for bucket in program.buckets:
        yield partial(edit, bucket.index)
