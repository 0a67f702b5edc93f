"""Rules on buckets, slots and gradients."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.buckets.slots_of_values import packed_slots, slot_of
from mirrorc.analysis.gradients.factored_gradients import stays_factored
from mirrorc.analysis.graph.aliases import ViewedVariables, origins
from mirrorc.analysis.graph.dying_arguments import dying_places
from mirrorc.ir import ops
from mirrorc.ir.nodes import (
    bucket_of,
    calls_to,
    is_compute,
    is_region_call,
    name_of,
    origin_of,
    pack_of,
    region_calls,
    region_of,
    replica_of,
)
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.routes import replica_at
from mirrorc.torch_internals import writes_argument
from mirrorc.verifier.rules.rule import Scope, Violation, calls, rule, say_pack, scopes


@rule(since=Stage.CAPTURED)
def sparse_tables_have_separate_buckets(program: Program) -> Iterator[Violation]:
    """The bucket of a table with a row-wise optimizer has no other gradient, and no element-wise update, because its
    sum has only the looked-up rows.
    """
    for bucket in program.buckets:
        slots = bucket.slots
        if bucket.rule.takes_rows and (len(slots) != 1 or len(slots[0].shape) != 2 or slots[0].offset):
            names = ", ".join(slot.variable for slot in slots)
            yield Violation(f"bucket {bucket.index} has {names}, but its optimizer takes rows, of one table")
        if bucket.rule.takes_rows and bucket.rule.elementwise:
            yield Violation(f"bucket {bucket.index} is updated element by element, but its optimizer takes rows")


@rule(since=Stage.CAPTURED)
def slots_are_disjoint(program: Program) -> Iterator[Violation]:
    """Slots are inside their bucket, one after the other, and have its dtype and update rule."""
    for i, bucket in enumerate(program.buckets):
        if bucket.index != i:
            yield Violation(f"bucket {bucket.index} is at place {i}: buckets are named by their place")
        for before, after in pairwise(bucket.slots):
            if before.offset + before.num_elements > after.offset:
                yield Violation(f"bucket {i}: the slots of {before.variable} and {after.variable} overlap")
        last = bucket.slots[-1]
        if last.offset + last.num_elements > bucket.num_elements or bucket.slots[0].offset < 0:
            yield Violation(f"bucket {i}: the slot of {last.variable} ends outside of the bucket")
        for slot in bucket.slots:
            variable = program.variables[slot.variable]
            if variable.dtype != bucket.dtype:
                yield Violation(f"bucket {i} is {bucket.dtype}, but {slot.variable} in it is {variable.dtype}")
            if variable.update != bucket.rule:
                yield Violation(f"bucket {i}: {slot.variable} follows another update rule than the bucket")


@rule(since=Stage.CAPTURED)
def gradients_and_slots_match(program: Program) -> Iterator[Violation]:
    """Every gradient of backward has exactly one slot, and every slot has a gradient."""
    if not program.buckets and program.stage is Stage.CAPTURED:
        return  # not planned yet
    if not program.buckets and any(variable.update is not None for variable in program.variables.values()):
        yield Violation("there is no bucket plan: run 'plan-buckets' on the captured program")
    slots = Counter(slot.variable for bucket in program.buckets for slot in bucket.slots)
    yield from (Violation(f"{name} is in {count} slots") for name, count in slots.items() if count > 1)
    graphs = program.shard_graphs if program.stage < Stage.REPLICATED else (program.graph,)
    for graph in graphs if program.stage < Stage.PACKED else ():
        assert graph is not None
        output = graph.output_node().args[0]
        gradients = set(output["gradients"]) if isinstance(output, dict) else set()
        yield from (Violation(f"the gradient of {name} has no slot") for name in sorted(gradients - set(slots)))
        yield from (Violation(f"the slot of {name} has no gradient") for name in sorted(set(slots) - gradients))


@rule(since=Stage.PACKED)
def every_bucket_is_packed_once(program: Program) -> Iterator[Violation]:
    """Each replica packs each bucket or pack exactly once, with one gradient of its shape and dtype for each slot. A replica
    without examples packs zeros.
    """
    for where, graph, replicas in scopes(program):
        times = Counter((pack_of(node), replica_of(node)) for node in calls_to(graph, ops.pack))
        for bucket, pack in program.packs:
            for replica in replicas:
                if times[(pack.number, replica)] != 1:
                    yield Violation(
                        f"{say_pack(bucket, pack)} is packed {times[(pack.number, replica)]} times on {where(replica)}"
                    )
        for node in calls_to(graph, ops.pack):
            bucket = program.buckets[bucket_of(node)]
            if replica_at(program, node) not in program.present:
                if node.args:
                    where_it_is = where(replica_of(node))
                    yield Violation(f"{node.name} packs gradients on {where_it_is}, which has no examples", node)
                continue
            slots = packed_slots(program, node)
            if len(node.args) != len(slots):
                packed = say_pack(bucket, *(pack for pack in bucket.packs if pack.number == pack_of(node)))
                yield Violation(f"{packed} has {len(slots)} slots but packs {len(node.args)} gradients", node)
                continue
            for slot, gradient in zip(slots, node.args, strict=True):
                value = gradient.meta["val"]  # type: ignore[union-attr]
                if tuple(value.shape) != slot.shape or value.dtype != bucket.dtype:
                    yield Violation(
                        f"bucket {bucket.index}: the gradient for {slot.variable} is {value.dtype}{list(value.shape)}, its "
                        f"slot {bucket.dtype}{list(slot.shape)}",
                        gradient,  # type: ignore[arg-type]
                    )


@rule(since=Stage.PACKED)
def every_gradient_is_packed_once(program: Program) -> Iterator[Violation]:
    """A gradient is packed once, or once for each pack of its bucket that it spans. Nothing but `pack` uses it."""
    for _, node in calls(program, ops.pack):
        for gradient in node.all_input_nodes:
            for user in gradient.users:
                is_of_bucket = user.target is ops.pack and bucket_of(user) == bucket_of(node)
                if user is not node and not (is_of_bucket and pack_of(user) != pack_of(node)):
                    yield Violation(
                        f"{gradient.name}, a gradient of bucket {bucket_of(node)}, is used by {user.name} as well",
                        user,
                    )
        if len(set(node.args)) != len(node.args):
            yield Violation(f"bucket {bucket_of(node)} packs one gradient into two slots", node)


@rule(since=Stage.PACKED)
def gradients_are_in_their_slots(program: Program) -> Iterator[Violation]:
    """A gradient is packed into its own variable's slot, on its own replica."""
    for _, node in calls(program, ops.pack):
        for slot, gradient in zip(packed_slots(program, node), node.all_input_nodes, strict=False):
            source = origin_of(gradient)
            if source.target in ops.FACTORED:
                if (source.kwargs["variable"], bucket_of(source)) != (slot.variable, bucket_of(node)):
                    yield Violation(
                        f"{source.name} is the gradient of {source.kwargs['variable']} in bucket {bucket_of(source)}, "
                        f"but is packed as that of {slot.variable} in bucket {bucket_of(node)}",
                        source,
                    )
                continue
            call = source.args[0] if source.target is operator.getitem else None
            if not isinstance(call, fx.Node) or not is_region_call(call):
                yield Violation(f"bucket {bucket_of(node)} packs {gradient.name}, which no region gives", node)
            elif call.kwargs["gradients"].get(slot.variable) != source.args[1]:  # type: ignore[union-attr]
                yield Violation(
                    f"{gradient.name} is not the gradient of {slot.variable}, as whose it is packed", gradient
                )
            elif replica_of(call) != replica_of(node):
                yield Violation(f"{node.name} packs {gradient.name} of another replica", node)


@rule(since=Stage.PACKED)
def replicas_factor_the_same_gradients(program: Program) -> Iterator[Violation]:
    """All replicas with examples leave the same gradients of a bucket as factors, because factors cannot be added to a
    whole gradient.
    """
    expected: dict[int, tuple[set[str], str]] = {}
    for where, node in calls(program, ops.pack):
        if replica_at(program, node) not in program.present:
            continue
        index, device = bucket_of(node), where(replica_of(node))
        slots = zip(packed_slots(program, node), node.args, strict=False)
        factored = {slot.variable for slot, gradient in slots if stays_factored(gradient)}
        others, first = expected.setdefault(pack_of(node), (factored, device))
        if factored != others:
            names = ", ".join(sorted(factored ^ others))
            yield Violation(f"bucket {index}: {names} is left as factors on one of {first} and {device} alone", node)


@rule(since=Stage.OUTLINED)
def factors_are_not_variables(program: Program) -> Iterator[Violation]:
    """A factor of a gradient is not a variable or a view of one, because an update may write the variable before the
    gradient is computed.
    """
    variables = ViewedVariables(program)
    for graph in program.graphs():
        for node in calls_to(graph, *ops.FACTORED):
            for factor in node.all_input_nodes:
                for variable in sorted(variables.of(factor))[:1]:
                    yield Violation(
                        f"{node.name} is made of {factor.name}, which is the variable {variable} itself", node
                    )


@rule(since=Stage.OUTLINED)
def slots_are_for_their_gradients(program: Program) -> Iterator[Violation]:
    """A region that takes a variable's slot belongs to the slot's replica, and writes the variable's gradient into the
    slot.
    """
    for graph in program.graphs():
        for call in region_calls(graph):
            yield from _wrong_slots(program, call)


@rule(since=Stage.CAPTURED, scope=Scope.GRAPH)
def regions_hold_operators_alone(program: Program, graph: fx.Graph) -> Iterator[Violation]:
    """A region's body has only operators of torch and `getitem`: no operation of mirrorc, and no call of a region."""
    region = next((region for region in program.regions.values() if region.graph_module.graph is graph), None)
    for node in graph.nodes if region is not None else ():
        is_allowed = is_compute(node) or node.target is operator.getitem
        if node.op not in ("placeholder", "output") and not is_allowed:
            name = region.name if region is not None else ""
            yield Violation(f"{node.name} in {name} calls {name_of(node)}, which is no operator of torch", node)


@rule(since=Stage.CAPTURED)
def regions_write_only_their_memory(program: Program) -> Iterator[Violation]:
    """A region writes only into its slots, its reserved memory, and arguments that die there: results of other regions
    in memory of their own, without other readers, and not returned. Old values are not read after the write. Operators
    outside of regions write nothing.
    """
    writes = {name: list(_writes(region.graph_module.graph)) for name, region in program.regions.items()}
    for graph in program.graphs():
        for node in _writes(graph):
            yield Violation(f"{node.target} writes its argument; use an operator that gives a new value", node)
        for call in region_calls(graph):
            yield from _foreign_writes(program, call, writes[region_of(call)])


def _writes(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if is_compute(node) and writes_argument(node.target))


def _foreign_writes(program: Program, call: fx.Node, writes: list[fx.Node]) -> Iterator[Violation]:
    placeholders = program.regions[region_of(call)].graph_module.graph.find_nodes(op="placeholder")
    writable = {
        placeholder
        for placeholder, argument in zip(placeholders, call.args, strict=False)
        if slot_of(argument) is not None or getattr(argument, "target", None) is ops.reserved
    }
    dying = {placeholders[place] for place in dying_places(program, call)} if len(writes) > len(writable) else set()
    body = program.regions[region_of(call)].graph_module.graph
    for node in writes:
        written: Any = node.args[0]
        if written in writable:
            continue
        if written not in dying:
            yield Violation(
                f"{node.name} in {region_of(call)} writes {written}, which is no slot, nor an argument that dies in {call.name}",
                node,
            )
        elif any(written in origins(result) for result in body.output_node().all_input_nodes):
            yield Violation(f"{region_of(call)} gives back {written}, into which {node.name} writes", node)
        else:
            yield from _stale_reads(region_of(call), node)


def _stale_reads(region: str, write: fx.Node) -> Iterator[Violation]:
    written: Any = write.args[0]
    nodes = list(write.graph.nodes)
    place = nodes.index(write)
    earlier = {node for node in nodes[:place] if written in origins(node)}
    for node in nodes[place + 1 :]:
        for read in node.all_input_nodes:
            if read in earlier:
                yield Violation(f"{node.name} in {region} reads {read}, whose memory {write.name} has written", node)


def _wrong_slots(program: Program, call: fx.Node) -> Iterator[Violation]:
    body = program.regions[region_of(call)].graph_module.graph
    results: Any = body.output_node().args[0]
    written = [r.args[0] if r.target is torch.ops.aten.copy_.default else r for r in results]
    placeholders = body.find_nodes(op="placeholder")
    gradients: Any = call.kwargs["gradients"]
    for placeholder, argument in zip(placeholders, call.args, strict=False):
        if isinstance(argument, fx.Node) and (slot := slot_of(argument)) is not None:
            place = gradients.get(slot.kwargs["variable"])
            if place is None or written[place] is not placeholder:
                name = slot.kwargs["variable"]
                yield Violation(f"the slot of {name} is given for another output of {call.name}", call)
            elif replica_of(argument) != replica_of(call):
                yield Violation(f"{argument.name} is a slot of another replica than {call.name}", call)
