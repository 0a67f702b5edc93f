"""Mutations that keep what a program means: the verifier must let a pass make them."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import fx

from mirrorc.analysis.buckets.rescaling import is_checked
from mirrorc.analysis.buckets.slots_of_values import slot_of
from mirrorc.analysis.gradients.eager_gradients import taken_gradients
from mirrorc.ir import ops
from mirrorc.ir.buckets import Slot
from mirrorc.ir.nodes import bucket_of, calls_to, is_compute, region_of, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.verifier.rules.rule import written_buckets
from mutations.places import IN_FLIGHT, insert_like, is_value, placed_nodes, region_calls, timelines, with_bucket
from mutations.reused import overwritten_values
from mutations.table import Edit, keeps

aten = torch.ops.aten
_READS = (ops.read, ops.slot)
_WRITES = (ops.update, ops.store, ops.write)


@keeps
def exchange_two_reads(program: Program) -> Iterator[Edit]:
    """Two reads, or two slots, that follow each other change places."""
    for graph in program.graphs():
        for one, other in pairwise(graph.nodes):
            if one.target in _READS and other.target in _READS:
                yield partial(other.append, one)


@keeps
def read_late(program: Program) -> Iterator[Edit]:
    """A read, or a slot, stands right before what uses it first."""
    for node in placed_nodes(program, *_READS):
        if node.users:
            yield partial(min(node.users).prepend, node)


@keeps
def read_early(program: Program) -> Iterator[Edit]:
    """A read, or a slot, is the first of all operations."""
    for graph in program.graphs():
        first = next(node for node in graph.nodes if node.op not in ("placeholder",))
        for node in calls_to(graph, *_READS):
            if node is not first:
                yield partial(first.prepend, node)


@keeps
def read_twice(program: Program) -> Iterator[Edit]:
    """A variable is read once more, by a read of its own for one of its users, or for nobody."""

    def edit(node: fx.Node, user: fx.Node | None) -> None:
        with node.graph.inserting_after(node):
            again = node.graph.node_copy(node)
        if user is not None:
            user.replace_input_with(node, again)

    for node in placed_nodes(program, ops.read):
        for user in (None, *node.users):
            yield partial(edit, node, user)


def _rename_nodes(graphs: list[fx.Graph]) -> None:
    for graph in graphs:
        for i, node in enumerate(graph.nodes):
            if node.op not in ("placeholder", "output"):
                node.name = f"value_{i}"


@keeps
def rename_all_nodes(program: Program) -> Iterator[Edit]:
    """Every node outside of regions has another name."""

    yield partial(_rename_nodes, program.graphs())


@keeps(in_regions=True)
def rename_values_in_regions(program: Program) -> Iterator[Edit]:
    """Every operator of a region has another name."""

    if program.regions:
        yield partial(_rename_nodes, [region.graph_module.graph for region in program.regions.values()])


def _moves_later(nodes: list[fx.Node], movable: tuple[object, ...], ordered: tuple[object, ...]) -> Iterator[Edit]:
    """Moves a node to right before the next that uses it, or that it must not overtake."""
    for i, node in enumerate(nodes):
        if node.target in movable:
            stops = [n for n in nodes[i + 1 :] if n.target in ordered or node in n.all_input_nodes]
            stop = stops[0] if stops else node.graph.output_node()
            users = [*node.users, stop]
            if node.next is not min(users):
                yield partial(min(users).prepend, node)


@keeps
def update_late(program: Program) -> Iterator[Edit]:
    """An update, a store or a write is the last of all operations."""
    offered = {bucket_of(node) for graph in program.graphs() for node in calls_to(graph, ops.updated)}
    for node in placed_nodes(program, *_WRITES):
        if offered & set(written_buckets(node)):
            continue  # other devices get what was updated
        end = node.graph.output_node()
        gathered = {bucket_of(launch) for launch in calls_to(node.graph, ops.gather_parameters)}
        if node.next is not end and gathered.isdisjoint(written_buckets(node)):
            yield partial(end.prepend, node)


@keeps
def wait_late(program: Program) -> Iterator[Edit]:
    """A wait stands right before its first use, or the next thing in flight of its replica."""
    for timeline in timelines(program):
        yield from _moves_later(timeline, (ops.wait,), (*IN_FLIGHT, ops.commit, ops.update, ops.step_optimizer))


@keeps
def wait_on_all_replicas_before_the_commit(program: Program) -> Iterator[Edit]:
    """A bucket is waited for, by all replicas, as soon as it is reduced: the sum is there before the step is decided."""

    def edit(found: list[fx.Node]) -> None:
        for wait in reversed(found):
            wait.all_input_nodes[0].append(wait)

    for bucket in program.buckets if program.stage >= Stage.UPDATED else ():
        waits = [wait for wait in placed_nodes(program, ops.wait) if bucket_of(wait) == bucket.index]
        if waits and all(wait.all_input_nodes[0].target in ops.REDUCTIONS for wait in waits):
            yield partial(edit, waits)


@keeps
def run_a_region_early(program: Program) -> Iterator[Edit]:
    """A region runs as soon as all is there that it needs."""
    for graph in program.graphs() if program.stage >= Stage.OUTLINED else ():
        for call in region_calls(graph.nodes):
            last = max(call.all_input_nodes)
            if last.next is not call:
                yield partial(last.append, call)


@keeps
def launch_late(program: Program) -> Iterator[Edit]:
    """A reduction is launched, on all devices, right before its first wait, the commit or the next launch."""

    def edit(place: int) -> None:
        for edits in later():
            edits[place]()

    def later() -> list[list[Edit]]:
        graphs = [[node for node in graph.nodes if node.op != "output"] for graph in program.graphs()]
        return [list(_moves_later(nodes, ops.REDUCTIONS, (*IN_FLIGHT, ops.commit))) for nodes in graphs]

    if program.stage >= Stage.REDUCED:
        for place in range(min(map(len, later()))):
            yield partial(edit, place)


@keeps
def pack_late(program: Program) -> Iterator[Edit]:
    """A bucket is packed right before its launch, what uses it, or the commit."""
    for pack in placed_nodes(program, ops.pack):
        commits = [commit for commit in calls_to(pack.graph, ops.commit) if replica_of(commit) == replica_of(pack)]
        stop = min([*pack.users, *commits])
        if pack.next is not stop:
            yield partial(stop.prepend, pack)


@keeps
def send_in_another_order(program: Program) -> Iterator[Edit]:
    """Two sends with no wait between them change places: they never block, and are known by their tags."""
    for timeline in timelines(program):
        for one, other in pairwise(node for node in timeline if node.target in (ops.send, ops.wait)):
            if one.target is other.target is ops.send:
                yield partial(other.append, one)


@keeps
def receive_early(program: Program) -> Iterator[Edit]:
    """A receipt, but not the wait for it, is launched before anything else of its replica."""
    for timeline in timelines(program):
        first = next((node for node in timeline if node.op != "placeholder"), None)
        commit = next((node for node in timeline if node.target is ops.commit and is_checked(node)), None)
        for node in timeline if first is not None else ():
            if (
                node.target is ops.recv
            ):  # after the commit of a step that may end there, what is sent is not sent for sure
                yield partial(first.prepend if commit is None or node < commit else commit.append, node)


@keeps
def exchange_neighbors_of_two_replicas(program: Program) -> Iterator[Edit]:
    """Two nodes of different replicas that follow each other change places."""
    for one, other in pairwise(program.graph.nodes) if program.graph is not None else ():
        replicas = replica_of(one), replica_of(other)
        if None not in replicas and replicas[0] != replicas[1] and other.op != "output":
            yield partial(other.append, one)


@keeps
def repeat_a_region_for_nobody(program: Program) -> Iterator[Edit]:
    """A region that writes into nothing, and takes nothing, runs twice; nobody uses what it gives the second time."""
    for graph in program.graphs() if program.stage >= Stage.OUTLINED else ():
        for call in region_calls(graph.nodes):
            given = call.all_input_nodes
            takes = taken_gradients(program.regions[region_of(call)].graph_module.graph)
            if not takes and not any(one.target in ops.OUTPUT_MEMORY or slot_of(one) is not None for one in given):
                yield partial(_repeat, call)


def _repeat(call: fx.Node) -> None:
    with call.graph.inserting_before(call):
        call.graph.node_copy(call)


@keeps
def compute_for_nobody(program: Program) -> Iterator[Edit]:
    """An operator of torch gives a value that nobody uses, of one in whose memory nothing is written."""

    def edit(node: fx.Node) -> None:
        with node.graph.inserting_after(node):
            made = node.graph.call_function(aten.neg.default, (node,))
        with node.meta["val"].fake_mode:
            made.meta["val"] = torch.neg(node.meta["val"])

    overwritten = overwritten_values(program)
    for timeline in timelines(program):
        others = (ops.read, ops.argument, ops.add_accumulated, ops.add_unsent, ops.compress, ops.reserved)
        saved = [n for n in timeline if is_value(n) and n.target not in others and n not in overwritten]
        for node in saved:
            is_gradient = any(user.target is ops.pack or user.op == "output" for user in node.users)
            is_gradient = is_gradient or slot_of(node) is not None  # microbatches may add to it yet
            if node.op != "placeholder" and node.meta["val"].is_floating_point() and not is_gradient:
                yield partial(edit, node)


@keeps
def clone_a_bucket_on_its_way(program: Program) -> Iterator[Edit]:
    """A packed bucket, or a sum, is copied before it is used; there is none of what is compressed, or left as factors or rows."""
    for node in placed_nodes(program, ops.pack, ops.wait):
        is_used = any(user.op != "output" for user in node.users)
        is_whole = isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].is_contiguous()
        parameters = node.target is ops.wait and node.args[0].target in (ops.broadcast, ops.recv)  # type: ignore[union-attr]
        takers = (ops.gather_factors, ops.decompress)
        is_unmade = program.buckets[bucket_of(node)].rule.takes_rows or any(
            u.target in takers or u.kwargs.get("part_elements") for u in node.users
        )
        if is_used and is_whole and not parameters and not is_unmade:
            yield partial(insert_like, node, aten.clone.default)  # type: ignore[arg-type]


@keeps
def order_slots_otherwise(program: Program) -> Iterator[Edit]:
    """A bucket's slots, and what is packed into them, are in another order."""

    def edit(index: int) -> Program:
        bucket = program.buckets[index]
        unit = 64 // bucket.dtype.itemsize
        slots: list[Slot] = []
        for slot in reversed(bucket.slots):
            offset = slots[-1].offset + -(-slots[-1].num_elements // unit) * unit if slots else 0
            slots.append(replace(slot, offset=offset))
        for pack in placed_nodes(program, ops.pack):
            if bucket_of(pack) == index:
                pack.args = pack.args[::-1]
        return with_bucket(program, index, slots=tuple(slots))

    for bucket in program.buckets:
        if len(bucket.slots) > 1 and not bucket.is_cut:
            yield partial(edit, bucket.index)


@keeps
def let_buckets_be_larger(program: Program) -> Iterator[Edit]:
    """A bucket is planned with room to spare."""
    for bucket in program.buckets if program.stage < Stage.PACKED else ():
        if not bucket.packs:  # which end with the bucket
            yield partial(with_bucket, program, bucket.index, num_elements=bucket.num_elements + 64)


@keeps
def exchange_independent_operators(program: Program) -> Iterator[Edit]:
    """Two operators of the captured graph that follow each other, neither of which needs the other, change places."""
    for graph in program.shard_graphs if program.stage is Stage.CAPTURED else ():
        for one, other in pairwise(graph.nodes):
            if is_compute(one) and is_compute(other) and one not in other.all_input_nodes:
                yield partial(other.append, one)


@keeps
def remark_something(program: Program) -> Iterator[Edit]:
    """A pass has something to say."""
    yield partial(program.evolve, remarks=(*program.remarks, "nothing was done"))
