"""The rules that the verifier checks: each is a function of a program that yields what breaks it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import networkx as nx
import torch
from torch import fx

from mirrorc import ops
from mirrorc.program import Bucket, Placement, Program, Stage
from mirrorc.source_lines import source_line


def graphs_are_well_formed(program: Program) -> Iterator[str]:
    """Every value is defined before it is used, in its own graph, and names are unique (torch.fx's own lint)."""
    for graph in (*program.graphs(), *(region.graph_module.graph for region in program.regions.values())):
        try:
            graph.lint()
        except (RuntimeError, ValueError) as error:
            yield f"graph is malformed: {error}"


def slots_are_disjoint(program: Program) -> Iterator[str]:
    """Slots lie inside their bucket, one after the other, and have their bucket's dtype and update rule."""
    for i, bucket in enumerate(program.buckets):
        if bucket.index != i:
            yield f"bucket {bucket.index} is at place {i}: buckets are named by their place"
        for before, after in pairwise(bucket.slots):
            if before.offset + before.num_elements > after.offset:
                yield f"bucket {i}: the slots of {before.variable} and {after.variable} overlap"
        last = bucket.slots[-1]
        if last.offset + last.num_elements > bucket.num_elements or bucket.slots[0].offset < 0:
            yield f"bucket {i}: the slot of {last.variable} ends outside of the bucket"
        for slot in bucket.slots:
            variable = program.variables[slot.variable]
            if variable.dtype != bucket.dtype:
                yield f"bucket {i} is {bucket.dtype}, but {slot.variable} in it is {variable.dtype}"
            if variable.update != bucket.rule:
                yield f"bucket {i}: {slot.variable} follows another update rule than the bucket"


def every_gradient_has_one_slot(program: Program) -> Iterator[str]:
    """Every gradient that backward makes is in exactly one slot, and no slot is without a gradient."""
    if not program.buckets and program.stage is Stage.CAPTURED:
        return  # not planned yet
    slots = Counter(slot.variable for bucket in program.buckets for slot in bucket.slots)
    yield from (f"{name} is in {count} slots" for name, count in slots.items() if count > 1)
    graphs = program.shard_graphs if program.stage < Stage.REPLICATED else (program.graph,)
    for graph in graphs if program.stage < Stage.PACKED else ():
        assert graph is not None
        output = graph.output_node().args[0]
        gradients = set(output["gradients"]) if isinstance(output, dict) else set()
        yield from (f"the gradient of {name} has no slot" for name in sorted(gradients - set(slots)))
        yield from (f"the slot of {name} has no gradient" for name in sorted(set(slots) - gradients))


def every_bucket_is_packed_once(program: Program) -> Iterator[str]:
    """Each replica packs each bucket exactly once, with one gradient for each slot, of that slot's shape and dtype."""
    for where, graph, replicas in _scopes(program):
        found = Counter((ops.bucket_of(node), ops.replica_of(node)) for node in ops.calls(graph, ops.pack))
        for bucket in program.buckets:
            for replica in replicas:
                if found[(bucket.index, replica)] != 1:
                    yield f"bucket {bucket.index} is packed {found[(bucket.index, replica)]} times on {where(replica)}"
        for node in ops.calls(graph, ops.pack):
            bucket = program.buckets[ops.bucket_of(node)]
            if len(node.args) != len(bucket.slots):
                yield f"bucket {bucket.index} has {len(bucket.slots)} slots but packs {len(node.args)} gradients{_at(node)}"
                continue
            for slot, gradient in zip(bucket.slots, node.args, strict=True):
                value = gradient.meta["val"]  # type: ignore[union-attr]
                if tuple(value.shape) != slot.shape or value.dtype != bucket.dtype:
                    yield (
                        f"bucket {bucket.index}: the gradient for {slot.variable} is {value.dtype}{list(value.shape)}, its "
                        f"slot {bucket.dtype}{list(slot.shape)}{_at(gradient)}"  # type: ignore[arg-type]
                    )


def every_gradient_is_packed_once(program: Program) -> Iterator[str]:
    """No gradient is packed twice, and nothing but `pack` uses it, so that it cannot be used unreduced."""
    for _, graph, _ in _scopes(program):
        for node in ops.calls(graph, ops.pack):
            for gradient in node.all_input_nodes:
                for user in gradient.users:
                    if user is not node:
                        yield f"{gradient.name}, a gradient of bucket {ops.bucket_of(node)}, is used by {user.name} as well"
            if len(set(node.args)) != len(node.args):
                yield f"bucket {ops.bucket_of(node)} packs one gradient into two slots{_at(node)}"


def gradients_are_in_their_own_slots(program: Program) -> Iterator[str]:
    """A gradient is packed as that of its own variable and replica."""
    for _, graph, _ in _scopes(program):
        for node in ops.calls(graph, ops.pack):
            for slot, gradient in zip(program.buckets[ops.bucket_of(node)].slots, node.all_input_nodes, strict=False):
                call = gradient.args[0] if gradient.target is operator.getitem else None
                if not isinstance(call, fx.Node) or not ops.is_region_call(call):
                    yield f"bucket {ops.bucket_of(node)} packs {gradient.name}, which no region gives{_at(node)}"
                elif call.kwargs["gradients"].get(slot.variable) != gradient.args[1]:  # type: ignore[union-attr]
                    yield f"{gradient.name} is not the gradient of {slot.variable}, as whose it is packed{_at(gradient)}"
                elif ops.replica_of(call) != ops.replica_of(node):
                    yield f"{node.name} packs {gradient.name} of another replica{_at(node)}"


def slots_are_given_for_their_gradients(program: Program) -> Iterator[str]:
    """A region that is given a variable's slot writes that variable's gradient into it, and has the slot's replica."""
    for graph in program.graphs():
        for call in graph.nodes:
            if ops.is_region_call(call):
                yield from _wrong_slots(program, call)


def _wrong_slots(program: Program, call: fx.Node) -> Iterator[str]:
    body = program.regions[ops.region_of(call)].graph_module.graph
    results: Any = body.output_node().args[0]
    written = [r.args[0] if r.target is torch.ops.aten.copy_.default else r for r in results]
    placeholders = [node for node in body.nodes if node.op == "placeholder"]
    gradients: Any = call.kwargs["gradients"]
    for placeholder, given in zip(placeholders, call.args, strict=False):
        if isinstance(given, fx.Node) and given.target is ops.slot:
            place = gradients.get(given.kwargs["variable"])
            if place is None or written[place] is not placeholder:
                name = given.kwargs["variable"]
                yield f"the slot of {name} is given for another output of {call.name}{_at(call)}"
            elif ops.replica_of(given) != ops.replica_of(call):
                yield f"{given.name} is a slot of another replica than {call.name}{_at(call)}"


def collectives_are_waited_for_once(program: Program) -> Iterator[str]:
    """Every pending value is waited for exactly once by each replica, under its own tag, and used by nothing else."""
    for where, graph, replicas in _scopes(program):
        for node in ops.calls(graph, *ops.COLLECTIVES):
            waits = Counter(ops.replica_of(user) for user in node.users if user.target is ops.wait)
            for replica in replicas:
                if waits[replica] != 1:
                    yield f"{_say(node)} is waited for {waits[replica]} times on {where(replica)}{_at(node)}"
            for user in node.users:
                if user.target is not ops.wait:
                    yield f"{_say(node)} is in flight but used by {user.name}; wait for it first{_at(user)}"
                elif ops.bucket_of(user) != ops.bucket_of(node):
                    yield f"{_say(node)} is waited for as bucket {ops.bucket_of(user)}{_at(user)}"
        for node in ops.calls(graph, ops.wait):
            if not isinstance(node.args[0], fx.Node) or node.args[0].target not in ops.COLLECTIVES:
                yield f"{node.name} waits for {node.args[0]}, which is not in flight{_at(node)}"


def buckets_in_flight_are_not_used(program: Program) -> Iterator[str]:
    """Between the launch of an all_reduce and its wait, nothing uses the bucket."""
    for _, graph, _ in _scopes(program):
        for node in ops.calls(graph, *ops.REDUCTIONS):
            for packed in node.all_input_nodes:
                others = [user for user in packed.users if user is not node]
                yield from (f"bucket {ops.bucket_of(node)} is in flight but used by {u.name}{_at(u)}" for u in others)
                if packed.kwargs.get("bucket") != ops.bucket_of(node):
                    yield f"{_say(node)} is given {packed.name}, which is another bucket{_at(node)}"


def collectives_mean_what_runs(program: Program) -> Iterator[str]:
    """Reductions add up, and a broadcast's root is the replica whose optimizer made the values."""
    for _, graph, _ in _scopes(program):
        for node in ops.calls(graph, *ops.REDUCTIONS):
            if node.kwargs["op"] != "sum":
                yield f"{_say(node)} has op={node.kwargs['op']}, but gradients are weighted to be summed{_at(node)}"
        for node in ops.calls(graph, ops.broadcast):
            for source in node.all_input_nodes:
                replica = _replica(program, source)
                if source.target is not ops.step_optimizer or replica != node.kwargs["root"]:
                    yield f"{_say(node)} has root={node.kwargs['root']}, which did not make the values{_at(node)}"


def _replica(program: Program, node: fx.Node) -> int:
    replica = ops.replica_of(node)
    return _place(program, node.graph) if replica is None else replica


def _place(program: Program, graph: fx.Graph) -> int:
    """The replica that a lowered graph is for: its place among the devices."""
    return next(i for i, module in enumerate(program.device_graphs.values()) if module.graph is graph)


def all_replicas_take_part(program: Program) -> Iterator[str]:
    """A collective of the mirrored graph joins every replica once, and each bucket is reduced once."""
    if program.graph is None or program.stage < Stage.REDUCED or program.num_replicas == 1:
        return
    reduced = Counter(ops.bucket_of(node) for node in ops.calls(program.graph, *ops.REDUCTIONS))
    for bucket in program.buckets:
        if reduced[bucket.index] != 1:
            yield f"bucket {bucket.index} is reduced {reduced[bucket.index]} times"
    for node in ops.calls(program.graph, *ops.COLLECTIVES):
        if node.target is ops.broadcast:
            continue  # the root alone gives
        found = [ops.replica_of(n) for n in node.all_input_nodes]
        if found != list(range(program.num_replicas)):
            yield f"{_say(node)} joins replicas {found}, not each of {program.num_replicas} once{_at(node)}"


def every_bucket_is_updated_once(program: Program) -> Iterator[str]:
    """Each copy of a bucket's parameters is updated exactly once, element by element, from the reduced bucket."""
    for where, graph, replicas in _scopes(program):
        done: Counter[tuple[int, int | None]] = Counter()
        for node in graph.nodes:
            done.update((index, ops.replica_of(node)) for index in _named_buckets(node))
        for bucket in program.buckets:
            for replica in replicas:
                expected = _expected_updates(program, bucket, replica, graph)
                if done[(bucket.index, replica)] != expected:
                    yield (
                        f"bucket {bucket.index} is updated {done[(bucket.index, replica)]} times on {where(replica)}, "
                        f"not {expected}"
                    )
        reduced = ops.wait if program.num_replicas > 1 else ops.pack
        for node in ops.calls(graph, ops.update, ops.step_optimizer, ops.store):
            given = ops.wait if node.target is ops.store else reduced
            for index, source in zip(_named_buckets(node), node.all_input_nodes, strict=False):
                if source.target is not given or ops.bucket_of(source) != index:
                    yield f"bucket {index} is updated from {source}, which is not its sum{_at(node)}"


def _expected_updates(program: Program, bucket: Bucket, replica: int | None, graph: fx.Graph) -> int:
    if bucket.placement is Placement.MIRRORED:
        return 1
    if replica is None:
        replica = _place(program, graph)
    if not bucket.rule.elementwise:
        return int(replica == 0)
    start, stop = bucket.share(replica, program.num_replicas)
    return int(start < stop)


def reductions_fit_the_placement(program: Program) -> Iterator[str]:
    """Shared parameters that are updated element by element get shares of the sum, all others the whole sum."""
    for _, graph, _ in _scopes(program):
        for node in ops.calls(graph, *ops.REDUCTIONS):
            bucket = program.buckets[ops.bucket_of(node)]
            by_shares = bucket.placement is Placement.SHARED and bucket.rule.elementwise
            if (node.target is ops.reduce_scatter) != by_shares:
                yield f"{_say(node)} does not fit its parameters, which are {bucket.placement.value}{_at(node)}"


def variables_are_written_after_reads(program: Program) -> Iterator[str]:
    """A replica writes a variable after every region of its own that reads it, or a view of it."""
    for where, graph, replicas in _scopes(program):
        for replica in replicas:
            written: set[str] = set()
            for node in graph.nodes:
                if ops.replica_of(node) != replica:
                    continue
                if node.target is ops.write:
                    written.add(str(node.kwargs["variable"]))
                for index in _named_buckets(node):
                    written.update(slot.variable for slot in program.buckets[index].slots)
                if written and ops.is_region_call(node):
                    early = sorted(written & {_variable_of(program, source) for source in node.all_input_nodes})
                    if early:
                        yield f"{early[0]} is written on {where(replica)} before {node.name} reads it{_at(node)}"


def _is_view(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return any(result.alias_info is not None for result in target._schema.returns)


def _variable_of(program: Program, node: fx.Node) -> str:
    """The variable that a value is, or is a view of; empty if it is a value of its own."""
    while node.target is operator.getitem:
        call = node.args[0]
        assert isinstance(call, fx.Node)
        if not ops.is_region_call(call):
            return ""
        body = program.regions[ops.region_of(call)].graph_module.graph
        value: Any = body.output_node().args[0][node.args[1]]  # type: ignore[index]
        while _is_view(value.target):
            value = value.args[0]
        if value.op != "placeholder":
            return ""
        given = call.args[[n for n in body.nodes if n.op == "placeholder"].index(value)]
        assert isinstance(given, fx.Node)
        node = given
    return str(node.kwargs["variable"]) if node.target is ops.read else ""


def shared_parameters_are_written_last(program: Program) -> Iterator[str]:
    """Before it writes shared parameters, a device has waited for a reduction that all devices launch after their last region."""
    shared = {bucket.index for bucket in program.buckets if bucket.placement is Placement.SHARED}
    if not shared:
        return
    orders = [
        (where(replica), [n for n in graph.nodes if n.target in ops.COLLECTIVES or ops.replica_of(n) == replica])
        for where, graph, replicas in _scopes(program)
        for replica in replicas
    ]
    late = set.intersection(*(_launched_after_regions(nodes) for _, nodes in orders))
    for where_name, nodes in orders:
        is_safe = False
        for node in nodes:
            if node.target is ops.wait:
                source = node.args[0]
                is_safe = is_safe or (isinstance(source, fx.Node) and _tag(source) in late)
            elif not is_safe and shared.intersection(_named_buckets(node)):
                yield f"{node.name} on {where_name} may write parameters that another device still reads{_at(node)}"


def _launched_after_regions(nodes: list[fx.Node]) -> set[tuple[str, int]]:
    last = max((i for i, n in enumerate(nodes) if ops.is_region_call(n)), default=-1)
    return {_tag(node) for node in nodes[last + 1 :] if node.target in ops.REDUCTIONS}


def _named_buckets(node: fx.Node) -> list[int]:
    """The buckets whose parameters a node writes, in the order in which it takes their gradients."""
    if node.target in (ops.update, ops.store):
        return [ops.bucket_of(node)]
    return list(node.kwargs["buckets"]) if node.target is ops.step_optimizer else []  # type: ignore[arg-type]


def _tag(node: fx.Node) -> tuple[str, int]:
    return ops.name_of(node), ops.bucket_of(node)


def every_collective_has_a_link(program: Program) -> Iterator[str]:
    """Every collective of a lowered program names the link that carries it out."""
    for _, graph, _ in _scopes(program):
        for node in ops.calls(graph, *ops.COLLECTIVES):
            if not node.kwargs.get("link"):
                yield f"{_say(node)} has no link; run 'lower-collectives' before 'lower-devices'{_at(node)}"


def no_device_waits_for_ever(program: Program) -> Iterator[str]:
    """No circle of waits: a wait follows what its own device does before it, and every device's launch of its collective."""
    if program.stage is not Stage.LOWERED:
        return
    order: nx.DiGraph[tuple[str, str]] = nx.DiGraph()
    launches: dict[tuple[str, int], list[tuple[str, str]]] = {}
    waits: list[tuple[tuple[str, int], tuple[str, str]]] = []
    for device, module in program.device_graphs.items():
        steps = [(device, node) for node in ops.calls(module.graph, *ops.COLLECTIVES, ops.wait)]
        order.add_nodes_from((device, node.name) for _, node in steps)
        order.add_edges_from(((device, a.name), (device, b.name)) for (_, a), (_, b) in pairwise(steps))
        for _, node in steps:
            if node.target is ops.wait:
                waits.append((_tag(node.args[0]), (device, node.name)))  # type: ignore[arg-type]
            else:
                launches.setdefault(_tag(node), []).append((device, node.name))
    order.add_edges_from((launch, wait) for tag, wait in waits for launch in launches.get(tag, []))
    if not nx.is_directed_acyclic_graph(order):
        circle = " -> ".join(f"{device}: {name}" for (device, name), _ in nx.find_cycle(order))
        yield f"devices would wait for each other for ever: {circle}"


def collectives_have_one_order(program: Program) -> Iterator[str]:
    """Every device launches the same collectives, with the same tags, in the same order, and waits in one order too."""
    if program.stage is not Stage.LOWERED:
        return
    orders = {
        name: [(*_tag(node), node.kwargs.get("link")) for node in ops.calls(m.graph, *ops.COLLECTIVES, ops.wait)]
        for name, m in program.device_graphs.items()
    }
    first_name, first = next(iter(orders.items()))
    for name, order in orders.items():
        for i, (expected, found) in enumerate(zip(first, order, strict=False)):
            if expected != found:
                yield (
                    f"collective {i} is {expected[0]} of bucket {expected[1]} on {first_name} but {found[0]} of bucket "
                    f"{found[1]} on {name}: the devices would wait for each other for ever"
                )
                break
        if len(order) != len(first):
            yield f"{first_name} takes part in {len(first)} collectives and waits, {name} in {len(order)}"


def _scopes(program: Program) -> Iterator[tuple[Callable[[int | None], str], fx.Graph, list[int | None]]]:
    """Graphs that hold operations of the IR, each with the replicas in it and a way to name them."""
    if program.graph is not None:
        yield lambda replica: str(program.devices[replica or 0]), program.graph, list(range(program.num_replicas))
    for name, module in program.device_graphs.items():
        yield lambda _, name=name: name, module.graph, [None]  # type: ignore[misc]


def _say(node: fx.Node) -> str:
    return f"{ops.name_of(node)} of bucket {ops.bucket_of(node)}"


def _at(node: fx.Node) -> str:
    line = source_line(node)
    return f" (at {line})" if line else ""
