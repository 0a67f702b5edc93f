"""Where things are in a program, and how to change them there: what kinds of mutations share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import calls_to, is_region_call, region_of, replica_of
from mirrorc.ir.program import Program, Stage

Thing = TypeVar("Thing")
IN_FLIGHT = (ops.send, *ops.LAUNCHES, ops.wait)


@dataclass
class Body:
    """Stands for a graph module. The verifier looks at graphs alone, and to generate their code would take most of the time."""

    graph: fx.Graph


def copied_program(program: Program, in_regions: bool = False) -> Program:
    graph = copied(program.graph) if program.graph is not None else None
    devices = {name: Body(copied(module.graph)) for name, module in program.device_graphs.items()}
    for name, body in devices.items():
        body.graph.owning_module = program.device_graphs[name]
    regions = program.regions
    if in_regions:
        regions = {
            name: replace(region, graph_module=Body(copied(region.graph_module.graph)))  # type: ignore[arg-type]
            for name, region in program.regions.items()
        }
    shards = tuple(copied(shard) for shard in program.shard_graphs)
    return program.evolve(shard_graphs=shards, graph=graph, device_graphs=devices, regions=regions)


def call_graphs(program: Program) -> list[fx.Graph]:
    return program.graphs() if program.stage >= Stage.OUTLINED else []


def bodies(program: Program) -> list[fx.Graph]:
    captured = list(program.shard_graphs) if program.stage is Stage.CAPTURED else []
    return captured + [region.graph_module.graph for region in program.regions.values()]


def timelines(program: Program) -> Iterator[list[fx.Node]]:
    """For each replica, its nodes and those that all share, in order."""
    if program.graph is not None:
        nodes = [node for node in program.graph.nodes if node.op != "output"]
        for replica in range(program.num_replicas):
            yield [n for n in nodes if replica_of(n) == replica or n.target in ops.COLLECTIVES]
    for module in program.device_graphs.values():
        yield [node for node in module.graph.nodes if node.op != "output"]


def placed_nodes(program: Program, *targets: Any) -> Iterator[fx.Node]:
    for graph in program.graphs():
        yield from calls_to(graph, *targets)


def region_calls(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if is_region_call(node)]


def read_variable(program: Program, node: fx.Node) -> str:
    """The variable whose memory a value shares: read, or given out by a region as a view of what it was given."""
    if node.target is ops.read:
        return str(node.kwargs["variable"])
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not is_region_call(source):
        return ""
    body = program.regions[region_of(source)].graph_module.graph
    value: Any = body.output_node().args[0][node.args[1]]  # type: ignore[index]
    while value.target in (torch.ops.aten.t.default, torch.ops.aten.detach.default):
        value = value.args[0]
    placeholders = [n for n in body.nodes if n.op == "placeholder"]
    return read_variable(program, source.args[placeholders.index(value)]) if value in placeholders else ""  # type: ignore[arg-type]


def variables_read(program: Program, nodes: Iterable[fx.Node]) -> dict[fx.Node, set[str]]:
    return {
        call: {read_variable(program, given) for given in call.all_input_nodes} - {""} for call in region_calls(nodes)
    }


def kind_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, ops.Pending):
        return "pending", kind_of(value.value)
    return tuple(map(kind_of, value)) if isinstance(value, list | tuple) else value


def type_of(node: fx.Node) -> Any:
    return kind_of(node.meta.get("val"))


def is_value(node: fx.Node) -> bool:
    """Whether a node gives a tensor that computations may take: no slot, no token, nothing in flight."""
    is_plain = node.op == "placeholder" or node.target not in (ops.slot, ops.pack, *IN_FLIGHT)
    return is_plain and node.op != "output" and isinstance(node.meta.get("val"), torch.Tensor)


def next_like(node: fx.Node, others: Iterable[fx.Node]) -> fx.Node | None:
    alike = [other for other in others if other is not node and type_of(other) == type_of(node)]
    return next((other for other in alike if node < other), alike[0] if alike else None)


def pairs_alike(things: Iterable[Thing], key: Callable[[Thing], Any]) -> Iterator[tuple[Thing, Thing]]:
    last: dict[Any, Thing] = {}
    for thing in things:
        if key(thing) in last:
            yield last[key(thing)], thing
        last[key(thing)] = thing


def with_argument(node: fx.Node, place: int, value: Any) -> None:
    node.args = (*node.args[:place], value, *node.args[place + 1 :])


def with_keywords(node: fx.Node, **kwargs: Any) -> None:
    node.kwargs = {**node.kwargs, **kwargs}


def exchanged(items: Sequence[Thing], one: int, other: int) -> tuple[Thing, ...]:
    places = {one: other, other: one}
    return tuple(items[places.get(place, place)] for place in range(len(items)))


def without(items: Sequence[Thing], place: int) -> tuple[Thing, ...]:
    return (*items[:place], *items[place + 1 :])


def exchange_args(one: fx.Node, other: fx.Node) -> None:
    one.args, other.args = other.args, one.args


def exchange_args_and_order(one: fx.Node, other: fx.Node) -> None:
    exchange_args(one, other)
    other.append(one)


def exchange_arguments(one: tuple[fx.Node, int], other: tuple[fx.Node, int]) -> None:
    mine, theirs = one[0].args[one[1]], other[0].args[other[1]]
    with_argument(*one, theirs)
    with_argument(*other, mine)


def bypass(node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    node.graph.erase_node(node)


def repeat(node: fx.Node) -> fx.Node:
    with node.graph.inserting_after(node):
        return node.graph.node_copy(node)


def repeat_at_the_end(node: fx.Node) -> None:
    with node.graph.inserting_before(node.graph.output_node()):
        node.graph.node_copy(node)


def with_commits(program: Program, target: Any) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The nodes outside of regions that call this, each with its replica's commit in the same graph."""
    commits = {(commit.graph, replica_of(commit)): commit for commit in placed_nodes(program, ops.commit)}
    for node in placed_nodes(program, target):
        if (node.graph, replica_of(node)) in commits:
            yield node, commits[node.graph, replica_of(node)]


def dropped(program: Program, target: Any) -> Iterator[Callable[[], object]]:
    for node in placed_nodes(program, target):
        yield partial(node.graph.erase_node, node)


def given_another(program: Program, target: Any) -> Iterator[Callable[[], object]]:
    """For each node that calls this, the edit that gives it what the next of its replica is given, of the same type."""
    for timeline in timelines(program):
        nodes = [node for node in timeline if node.target is target]
        values = [node.all_input_nodes[0] for node in nodes]
        for node, value in zip(nodes, values, strict=True):
            other = next_like(value, values)
            if other is not None and other is not value:
                yield partial(with_argument, node, 0, other)


def insert_like(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Puts an operator that keeps a value's type between the value and all that uses it."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(target, (node, *args))
    made.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return made


def all_of_packs_is_used(program: Program) -> bool:
    """Whether each device uses all that it gets of packs: not where it takes its share of a bucket that is reduced whole."""
    return not any(bucket.is_cut and bucket.updates_by_shares for bucket in program.buckets)


def with_bucket(program: Program, index: int, **changes: Any) -> Program:
    buckets: list[Bucket] = list(program.buckets)
    buckets[index] = replace(buckets[index], **changes)
    return program.evolve(buckets=tuple(buckets))
