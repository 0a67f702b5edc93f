"""Rules on microbatches, whose gradients are added in the same slots."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.buckets.slots_of_values import slot_arguments
from mirrorc.custom_ops import out_products
from mirrorc.ir import ops
from mirrorc.ir.gradient_forms import FORMS
from mirrorc.ir.nodes import calls_to, region_calls, region_of, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.routes import replica_at, replica_of_graph
from mirrorc.verifier.rules.rule import Order, Violation, calls, rule, scopes

aten = torch.ops.aten
_ADDING = (out_products.addmm_into, out_products.add_rows_into)


@rule(since=Stage.CAPTURED, order=Order.REFERENCES)
def microbatches_make_up_the_shards(program: Program) -> Iterator[Violation]:
    """The microbatches of a replica have all of its examples, and none is empty. A shard graph runs for each
    microbatch, until a pass joins them.
    """
    if program.microbatches and len(program.microbatches) != program.num_replicas:
        yield Violation(f"{program.num_replicas} replicas have microbatches of {program.microbatches}")
        return
    for replica, sizes in enumerate(program.microbatches):
        num_examples = program.num_examples[replica] if replica < len(program.num_examples) else None
        if sum(sizes) != num_examples or not all(size > 0 for size in sizes):
            yield Violation(f"replica {replica} has {num_examples} examples, but microbatches of {sizes}")
    run = program.shard_of_microbatch
    if not run:
        return
    if program.stage >= Stage.REPLICATED:
        yield Violation("the graphs are still those of microbatches: run 'accumulate-microbatches' before 'replicate'")
    if [len(shards) for shards in run] != [len(sizes) for sizes in program.microbatches]:
        yield Violation(f"the microbatches of {program.microbatches} run the graphs {run}")
    elif not all(0 <= shard < len(program.shard_graphs) for shards in run for shard in shards):
        yield Violation(f"microbatches run the shard graphs {run} of {len(program.shard_graphs)}")
    elif [shards[0] if shards else None for shards in run] != list(program.shard_of_replica):
        yield Violation(f"the first microbatches run the graphs {run}, but the replicas {program.shard_of_replica}")


@rule(since=Stage.REPLICATED, order=Order.OWNERS)
def each_microbatch_is_taken_once(program: Program) -> Iterator[Violation]:
    """A replica uses either each of its microbatches of an argument once, or none of them."""
    for where, graph, replicas in scopes(program):
        for replica in replicas:
            place = replica_of_graph(program, graph) if replica is None else replica
            sizes = program.microbatches[place] if program.microbatches and place is not None else ()
            taken: dict[Any, list[Any]] = {}
            for node in calls_to(graph, ops.microbatch):
                if replica_of(node) != replica:
                    continue
                taken.setdefault(node.args[0], []).append(node.kwargs["index"])
                if tuple(node.kwargs["sizes"]) != sizes:  # type: ignore[arg-type]
                    yield Violation(
                        f"{node.name} splits {node.kwargs['sizes']}, but the microbatches of {where(replica)} are {sizes}",
                        node,
                    )
            for argument, indices in taken.items():
                if sorted(indices) != list(range(len(sizes))):
                    yield Violation(
                        f"{where(replica)} takes the microbatches {indices} of {argument.name}, which has {len(sizes)}",
                        argument,
                    )


@rule(since=Stage.REPLICATED)
def each_microbatch_gives_its_factors(program: Program) -> Iterator[Violation]:
    """A gradient left as factors has, once, the factors of each microbatch of its replica."""
    for _, node in calls(program, *FORMS):
        parts, replica = FORMS[node.target].parts(node.args), replica_at(program, node)
        number = max(1, len(program.microbatches[replica])) if program.microbatches else 1
        if len(parts) != number:
            yield Violation(f"{node.name} has the factors of {len(parts)} microbatches, where {number} are run", node)
        elif len(set(parts)) < number:
            yield Violation(f"{node.name} has the factors of one microbatch twice", node)


@rule(since=Stage.OUTLINED)
def gradients_are_added_where_they_are(program: Program) -> Iterator[Violation]:
    """A region reads its slot only if an earlier microbatch or region has written a gradient there. It then adds to
    that gradient, which has no other user.
    """
    reading = {name: _slots_read(region.graph_module.graph) for name, region in program.regions.items()}
    for graph in program.graphs():
        for call in region_calls(graph):
            for place, _ in slot_arguments(call):
                slot: Any = call.args[place]
                reads = place in reading.get(region_of(call), ())
                if slot.target is ops.slot and reads:
                    yield Violation(
                        f"{call.name} adds to {slot.name}, in which nothing of this step is yet: the first one "
                        "must write there",
                        call,
                    )
                elif slot.target is not ops.slot and not reads:
                    yield Violation(
                        f"{call.name} overwrites {slot.name}, the gradient that is there already, in place of adding to it",
                        call,
                    )
                elif slot.target is not ops.slot and (other := next((u for u in slot.users if u is not call), None)):
                    yield Violation(
                        f"{other.name} uses {slot.name}, to which {call.name} adds: it is no gradient of its own any more",
                        other,
                    )


def _slots_read(body: fx.Graph) -> set[int]:
    places = set()
    for place, argument in enumerate(body.find_nodes(op="placeholder")):
        writers = [user for user in argument.users if _writes(user, argument)]
        readers = [user for user in argument.users if user not in writers or user.target in _ADDING]
        if writers and any(user.op != "output" and user.target is not operator.getitem for user in readers):
            places.add(place)
    return places


def _writes(user: fx.Node, argument: fx.Node) -> bool:
    return user.target in (out_products.mm_into, *_ADDING, aten.copy_.default) and user.args[0] is argument
