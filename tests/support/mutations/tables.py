"""Mutations of what a program says of itself: its devices, its arguments, its shards."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import fx

from mirrorc.ir.program import Program, Stage
from mirrorc.ir.variables import Aggregation, Role, Synchronization
from mutations.places import kind_of
from mutations.table import Edit, breaks


def _operations(graph: fx.Graph) -> list[str]:
    return sorted(f"{n.target} {n.kwargs} {kind_of(n.meta.get('val'))}" for n in graph.nodes)


@breaks
def exchange_the_shards_of_two_replicas(program: Program) -> Iterator[Edit]:
    """Two replicas run the graphs for each other's number of examples."""
    shards = program.shard_of_replica
    for i, (one, other) in enumerate(pairwise(shards)):
        if one != other:
            yield partial(program.evolve, shard_of_replica=(*shards[:i], other, one, *shards[i + 2 :]))


@breaks
def exchange_the_programs_of_two_devices(program: Program) -> Iterator[Edit]:
    """Two devices run each other's programs, which differ."""
    found = list(program.device_graphs.items())
    for i, ((name, one), (other_name, other)) in enumerate(pairwise(found)):
        if _operations(one.graph) != _operations(other.graph):
            exchanged = dict([*found[:i], (name, other), (other_name, one), *found[i + 2 :]])
            yield partial(program.evolve, device_graphs=exchanged)


@breaks
def drop_the_program_of_a_device(program: Program) -> Iterator[Edit]:
    """A device has no program."""
    for name in program.device_graphs if program.num_replicas > 1 else ():
        rest = {other: module for other, module in program.device_graphs.items() if other != name}
        yield partial(program.evolve, device_graphs=rest)
    if program.shard_of_replica and program.num_replicas > 1:
        yield partial(program.evolve, shard_of_replica=program.shard_of_replica[:-1])


@breaks
def lose_the_graph(program: Program) -> Iterator[Edit]:
    """A program has no graph of its stage."""
    has = {"shard_graphs": program.shard_graphs, "graph": program.graph, "device_graphs": program.device_graphs}
    empty: dict[str, Any] = {"shard_graphs": (), "graph": None, "device_graphs": {}}
    yield from (partial(program.evolve, **{key: empty[key]}) for key, value in has.items() if value)


@breaks
def exchange_two_arguments(program: Program) -> Iterator[Edit]:
    """Two arguments, which are passed by their order, change places: in one device's program, or in the table."""
    for module in program.device_graphs.values():
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        for one, other in pairwise(placeholders):
            yield partial(other.append, one)
    arguments = program.arguments
    for i in range(len(arguments) - 1):
        exchanged = (*arguments[:i], arguments[i + 1], arguments[i], *arguments[i + 2 :])
        yield partial(program.evolve, arguments=exchanged)


@breaks
def change_what_a_variable_is(program: Program) -> Iterator[Edit]:
    """A variable's entry in the table has another shape, dtype, role, synchronization or aggregation."""

    def edit(name: str, **changes: Any) -> Program:
        changed = replace(program.variables[name], **changes)
        return program.evolve(variables={**program.variables, name: changed})

    for name, variable in program.variables.items():
        yield partial(edit, name, shape=(*variable.shape, 1), strides=(*variable.strides, 1))
        if variable.synchronization is Synchronization.PER_REPLICA:
            yield partial(edit, name, synchronization=Synchronization.MIRRORED, aggregation=Aggregation.NONE)
        elif variable.role is Role.PARAMETER:
            yield partial(edit, name, synchronization=Synchronization.PER_REPLICA)
        if program.buckets and variable.update is not None:
            yield partial(edit, name, update=None)


@breaks
def forget_a_variable(program: Program) -> Iterator[Edit]:
    """A variable is missing from the table."""
    for name in program.variables:
        rest = {other: variable for other, variable in program.variables.items() if other != name}
        yield partial(program.evolve, variables=rest)


@breaks
def forget_a_region(program: Program) -> Iterator[Edit]:
    """A region is missing from the table."""
    for name in program.regions if program.stage >= Stage.OUTLINED else ():
        rest = {other: region for other, region in program.regions.items() if other != name}
        yield partial(program.evolve, regions=rest)
