"""Rules on collectives: that all take part, that all wait, that none waits for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import networkx as nx
from torch import fx

from mirrorc import ops
from mirrorc.program import Program, Stage
from mirrorc.rules.programs import at, place_of, say, scopes, tag


def collectives_are_waited_for_once(program: Program) -> Iterator[str]:
    """Every pending value is waited for exactly once by each replica, under its own tag, and used by nothing else."""
    for where, graph, replicas in scopes(program):
        for node in ops.calls(graph, *ops.COLLECTIVES):
            waits = Counter(ops.replica_of(user) for user in node.users if user.target is ops.wait)
            for replica in replicas:
                if waits[replica] != 1:
                    yield f"{say(node)} is waited for {waits[replica]} times on {where(replica)}{at(node)}"
            for user in node.users:
                if user.target is not ops.wait:
                    yield f"{say(node)} is in flight but used by {user.name}; wait for it first{at(user)}"
                elif ops.bucket_of(user) != ops.bucket_of(node):
                    yield f"{say(node)} is waited for as bucket {ops.bucket_of(user)}{at(user)}"
        for node in ops.calls(graph, ops.wait):
            if not isinstance(node.args[0], fx.Node) or node.args[0].target not in ops.COLLECTIVES:
                yield f"{node.name} waits for {node.args[0]}, which is not in flight{at(node)}"


def buckets_in_flight_are_not_used(program: Program) -> Iterator[str]:
    """Between the launch of an all_reduce and its wait, nothing uses the bucket."""
    for _, graph, _ in scopes(program):
        for node in ops.calls(graph, *ops.REDUCTIONS):
            for packed in node.all_input_nodes:
                others = [user for user in packed.users if user is not node]
                yield from (f"bucket {ops.bucket_of(node)} is in flight but used by {u.name}{at(u)}" for u in others)
                if packed.kwargs.get("bucket") != ops.bucket_of(node):
                    yield f"{say(node)} is given {packed.name}, which is another bucket{at(node)}"


def collectives_mean_what_runs(program: Program) -> Iterator[str]:
    """Reductions add up, and a broadcast's root is the replica whose optimizer made the values."""
    for _, graph, _ in scopes(program):
        for node in ops.calls(graph, *ops.REDUCTIONS):
            if node.kwargs["op"] != "sum":
                yield f"{say(node)} has op={node.kwargs['op']}, but gradients are weighted to be summed{at(node)}"
        for node in ops.calls(graph, ops.broadcast):
            for source in node.all_input_nodes:
                replica = _replica(program, source)
                if source.target is not ops.step_optimizer or replica != node.kwargs["root"]:
                    yield f"{say(node)} has root={node.kwargs['root']}, which did not make the values{at(node)}"


def _replica(program: Program, node: fx.Node) -> int:
    replica = ops.replica_of(node)
    return place_of(program, node.graph) if replica is None else replica


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
            yield f"{say(node)} joins replicas {found}, not each of {program.num_replicas} once{at(node)}"


def every_collective_has_a_link(program: Program) -> Iterator[str]:
    """Every collective of a lowered program names the link that carries it out."""
    for _, graph, _ in scopes(program):
        for node in ops.calls(graph, *ops.COLLECTIVES):
            if not node.kwargs.get("link"):
                yield f"{say(node)} has no link; run 'lower-collectives' before 'lower-devices'{at(node)}"


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
                waits.append((tag(node.args[0]), (device, node.name)))  # type: ignore[arg-type]
            else:
                launches.setdefault(tag(node), []).append((device, node.name))
    order.add_edges_from((launch, wait) for tag, wait in waits for launch in launches.get(tag, []))
    if not nx.is_directed_acyclic_graph(order):
        circle = " -> ".join(f"{device}: {name}" for (device, name), _ in nx.find_cycle(order))
        yield f"devices would wait for each other for ever: {circle}"


def collectives_have_one_order(program: Program) -> Iterator[str]:
    """Every device launches the same collectives, with the same tags, in the same order, and waits in one order too."""
    if program.stage is not Stage.LOWERED:
        return
    orders = {
        name: [(*tag(node), node.kwargs.get("link")) for node in ops.calls(m.graph, *ops.COLLECTIVES, ops.wait)]
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
