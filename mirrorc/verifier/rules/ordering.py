"""Rules on lowered programs, which hold for every interleaving of the devices' threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.routes import Route, route_of
from mirrorc.ir.value_types import say_type, value_type
from mirrorc.verifier.rules.meetings_of_replicas import tag_of_meeting
from mirrorc.verifier.rules.rule import Order, Violation, calls, rule, say, scopes, tag

_COMMIT = ("commit", 0)
Step = tuple[str, fx.Node]  # a device, and a node of its program


@rule(since=Stage.LOWERED)
def collectives_have_the_same_order(program: Program) -> Iterator[Violation]:
    """All devices launch the same collectives (with equal tags, types and links) in one order, and wait for them in one
    order.
    """
    orders = {
        name: [node for node in calls_to(module.graph, *ops.COLLECTIVES, ops.wait) if _is_collective(node)]
        for name, module in program.device_graphs.items()
    }
    first_name, first = next(iter(orders.items()))
    for name, order in orders.items():
        for i, (expected, actual) in enumerate(zip(first, order, strict=False)):
            if _signature(expected) != _signature(actual):
                yield Violation(
                    f"collective {i} is {_describe(expected)} on {first_name} but {_describe(actual)} on {name}: the devices "
                    "would wait for each other forever, or add up what does not belong together",
                    actual,
                )
                break
        if len(order) != len(first):
            yield Violation(f"{first_name} takes part in {len(first)} collectives and waits, {name} in {len(order)}")


def _is_collective(node: fx.Node) -> bool:
    """A `recv` is no collective: only one device has it."""
    return node.target in ops.COLLECTIVES or any(n.target in ops.COLLECTIVES for n in node.all_input_nodes)


def _signature(node: fx.Node) -> Any:
    return (*tag(node), node.kwargs.get("link"), node.kwargs.get("op"), _operand_types(node))


def _operand_types(node: fx.Node) -> tuple[Any, ...]:
    """Empty for a broadcast: only its root has an operand."""
    if node.target not in ops.REDUCTIONS:
        return ()
    return tuple(value_type(source.meta.get("val"))[:4] for source in node.all_input_nodes)


def _describe(node: fx.Node) -> str:
    sources = node.all_input_nodes if node.target in ops.REDUCTIONS else ()
    operands = "".join(f" {say_type(value_type(source.meta.get('val')))}" for source in sources)
    link = f" over {node.kwargs['link']}" if node.kwargs.get("link") else ""
    return f"{say(node)}{operands}{link}"


@rule(since=Stage.SCHEDULED, order=Order.OWNERS)
def waits_are_on_the_same_side_of_the_commit(program: Program) -> Iterator[Violation]:
    """All replicas wait for a collective before their commits, or all after them, because a link may need all of them
    in a wait.
    """
    first: dict[tuple[str, int], tuple[bool, str]] = {}
    for where, graph, _ in scopes(program):
        commits = {replica_of(node): node for node in calls_to(graph, ops.commit)}
        for node in calls_to(graph, ops.wait):
            launch, commit = node.args[0] if node.args else None, commits.get(replica_of(node))
            if commit is None or not isinstance(launch, fx.Node) or launch.target not in ops.COLLECTIVES:
                continue
            name = where(replica_of(node))
            is_before, other = first.setdefault(tag(launch), (node < commit, name))
            if is_before != (node < commit):
                places = ("after", "before") if is_before else ("before", "after")
                yield Violation(
                    f"{name} waits for the {say(launch)} {places[0]} its commit, {other} {places[1]} its own: they would wait "
                    "for each other forever",
                    node,
                )


@rule(since=Stage.REDUCED)
def every_send_is_received(program: Program) -> Iterator[Violation]:
    """Each send has one receive, with the same tag and link, on its destination. Each receive has one send."""
    sent: Counter[tuple[Route, Any]] = Counter()
    received: Counter[tuple[Route, Any]] = Counter()
    nodes: dict[tuple[Route, Any], fx.Node] = {}
    for _, node in calls(program, ops.send, ops.recv):
        route = route_of(program, node)
        key = (route, node.kwargs.get("link"))
        (sent if node.target is ops.send else received)[key] += 1
        nodes[key] = node
        if route.source == route.destination:
            yield Violation(f"{say(node)} is from replica {route.source} to itself", node)
    for key, node in nodes.items():
        if sent[key] != 1 or received[key] != 1:
            route, _ = key
            yield Violation(
                f"{route} is sent {sent[key]} times from replica {route.source} to {route.destination} and received "
                f"{received[key]} times there",
                node,
            )


@rule(since=Stage.LOWERED)
def no_device_waits_forever(program: Program) -> Iterator[Violation]:
    """Waits form no cycle. A wait follows earlier nodes of its device, and all launches and sends that it needs. A
    commit, or a collective of the model, follows earlier nodes of all devices.
    """
    import networkx as nx

    order: nx.DiGraph[tuple[str, str]] = nx.DiGraph()
    givers: dict[Route | tuple[str, int], list[tuple[str, str]]] = {}
    waits: list[tuple[Any, tuple[str, str]]] = []
    for device, module in program.device_graphs.items():
        nodes = list(calls_to(module.graph, *ops.COLLECTIVES, *ops.MEETINGS, ops.send, ops.wait, ops.commit))
        places = [place for node in nodes for place in _places(device, node)]
        order.add_nodes_from(places)
        order.add_edges_from(pairwise(places))
        for node in nodes:
            place = (device, node.name)
            if node.target is ops.commit:
                waits.append((_COMMIT, place))
                givers.setdefault(_COMMIT, []).append(_places(device, node)[0])
            elif node.target in ops.MEETINGS:
                waits.append((tag_of_meeting(node), place))
                givers.setdefault(tag_of_meeting(node), []).append(_places(device, node)[0])
            elif node.target is ops.wait:
                waits.extend((key, place) for key in _awaited(program, node))
            else:
                giver = route_of(program, node) if node.target is ops.send else tag(node)
                givers.setdefault(giver, []).append(place)
    order.add_edges_from((giver, wait) for key, wait in waits for giver in givers.get(key, []))
    if not nx.is_directed_acyclic_graph(order):
        circle = " -> ".join(f"{device}: {name}" for (device, name), _ in nx.find_cycle(order))
        yield Violation(f"devices would wait for each other forever: {circle}")


def _places(device: str, node: fx.Node) -> list[tuple[str, str]]:
    """A node's vertices in the graph of waits. A commit or a collective of the model has two: arrival and end."""
    arrives = node.target is ops.commit or node.target in ops.MEETINGS
    arrival = [(device, f"before {node.name}")] if arrives else []
    return [*arrival, (device, node.name)]


def _awaited(program: Program, wait: fx.Node) -> list[Any]:
    launch = wait.args[0] if wait.args else None
    if not isinstance(launch, fx.Node):
        return []
    if launch.target is ops.recv:
        return [route_of(program, launch)]
    return [tag(launch)] if launch.target in ops.COLLECTIVES else []
