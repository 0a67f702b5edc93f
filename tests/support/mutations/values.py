"""Mutations of what is computed from what, of types, and of whose a value is."""

import operator
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import is_compute, is_region_call, region_of
from mirrorc.ir.program import Program, Stage
from mutations.places import (
    bodies,
    call_graphs,
    exchange_args,
    exchange_arguments,
    exchanged,
    is_value,
    kind_of,
    next_like,
    pairs_alike,
    region_calls,
    timelines,
    type_of,
    with_argument,
    with_keywords,
)
from mutations.table import Edit, breaks

_USED_BY_NOBODY = (ops.wait, ops.update, ops.store, ops.send, ops.step_optimizer, ops.write)


def _lines(program: Program) -> list[list[fx.Node]]:
    return [[n for n in shard.nodes if n.op != "output"] for shard in program.shard_graphs] + list(timelines(program))


def _values_given(call: fx.Node) -> list[tuple[int, fx.Node]]:
    return [(place, given) for place, given in enumerate(call.args) if isinstance(given, fx.Node) and is_value(given)]


@breaks(is_judged=True)
def read_another_variable(program: Program) -> Iterator[Edit]:
    """A read reads another variable of the same type."""
    for line in _lines(program):
        reads = [node for node in line if node.target is ops.read]
        for read in reads:
            other = next_like(read, reads)
            if other is not None:
                yield partial(with_keywords, read, variable=other.kwargs["variable"])


@breaks(is_judged=True)
def feed_a_region_another_variable(program: Program) -> Iterator[Edit]:
    """A region, or a captured operator, is given another variable of the same type."""
    for line in _lines(program):
        reads = [node for node in line if node.target is ops.read]
        for node in line:
            for place, given in _values_given(node):
                other = next_like(given, [read for read in reads if read < node]) if given.target is ops.read else None
                if other is not None and (is_region_call(node) or is_compute(node)):
                    yield partial(with_argument, node, place, other)


@breaks(is_judged=True)
def feed_a_region_another_value(program: Program) -> Iterator[Edit]:
    """A region, or a captured operator, is given another value of the same type: an argument, a saved one, a variable."""
    for line in _lines(program):
        values = [node for node in line if is_value(node)]
        for node in line:
            if is_region_call(node) or is_compute(node):
                for place, given in _values_given(node):
                    other = next_like(given, [value for value in values if value < node])
                    if other is not None:
                        yield partial(with_argument, node, place, other)


@breaks(is_judged=True)
def exchange_arguments_of_a_region(program: Program) -> Iterator[Edit]:
    """Two arguments of a region call, of one type, change places."""

    def edit(call: fx.Node, one: int, other: int) -> None:
        call.args = exchanged(call.args, one, other)

    for line in _lines(program) if program.stage >= Stage.OUTLINED else ():
        for call in region_calls(line):
            places = [place for place, _ in _values_given(call)]
            for one, other in pairs_alike(places, lambda place, call=call: type_of(call.args[place])):  # type: ignore[misc]
                yield partial(edit, call, one, other)


@breaks(is_judged=True)
def exchange_arguments_of_two_regions(program: Program) -> Iterator[Edit]:
    """Two region calls get each other's value of one type."""

    for line in _lines(program) if program.stage >= Stage.OUTLINED else ():
        given = [(call, place) for call in region_calls(line) for place, _ in _values_given(call)]
        for one, other in pairs_alike(given, lambda pair: type_of(pair[0].args[pair[1]])):  # type: ignore[arg-type]
            first = min(one[0], other[0])
            if one[0] is not other[0] and all(call.args[place] < first for call, place in (one, other)):  # type: ignore[operator]
                yield partial(exchange_arguments, one, other)


@breaks(is_judged=True)
def take_another_part_of_a_result(program: Program) -> Iterator[Edit]:
    """Two parts of a region's results, of one type, are taken for each other."""

    for graph in call_graphs(program):
        for call in region_calls(graph.nodes):
            for one, other in pairs_alike(call.users, type_of):
                yield partial(exchange_args, one, other)


@breaks
def use_another_replicas_value(program: Program) -> Iterator[Edit]:
    """Something of one replica is given what another replica has in that place."""
    lines = list(timelines(program)) if program.graph is not None else []
    for line, others in zip(lines, lines[1:] + lines[:1], strict=True):
        theirs = dict(zip(line, others, strict=False)) if len(line) == len(others) else {}
        for node in line if line is not others else ():
            for place, given in enumerate(node.args) if node.target not in ops.COLLECTIVES else ():
                other = theirs.get(given)  # type: ignore[call-overload]
                if other is not None and other is not given and node.target is not operator.getitem and other < node:
                    yield partial(with_argument, node, place, other)


@breaks
def change_a_replica(program: Program) -> Iterator[Edit]:
    """A node is said to be another replica's, or that of none."""
    if program.graph is not None and program.num_replicas > 1:
        for node in program.graph.nodes:
            if "replica" in node.kwargs and (node.users or node.target in _USED_BY_NOBODY):
                for replica in ((node.kwargs["replica"] + 1) % program.num_replicas, program.num_replicas, None):
                    yield partial(with_keywords, node, replica=replica)


@breaks(is_judged=True)
def call_another_region(program: Program) -> Iterator[Edit]:
    """A region is called in place of another that takes and gives values of the same types, or one that does not exist."""

    def signature(name: str) -> Any:
        nodes = list(program.regions[name].graph_module.graph.nodes)
        results = nodes[-1].args[0]
        return tuple(type_of(n) for n in nodes if n.op == "placeholder"), tuple(type_of(n) for n in results)

    def edit(call: fx.Node, name: str) -> None:
        if call.op == "call_module":
            call.target = name
        else:
            with_keywords(call, region=name)

    alike = dict(pairs_alike(program.regions, signature))
    for graph in call_graphs(program):
        for call in region_calls(graph.nodes):
            yield partial(edit, call, "no_such_region")
            other = alike.get(region_of(call))
            if other is not None and _text(program, other) != _text(program, region_of(call)):
                yield partial(edit, call, other)


def _text(program: Program, region: str) -> str:
    return "\n".join(str((n.target, n.args)) for n in program.regions[region].graph_module.graph.nodes)


@breaks(is_judged=True)
def give_another_loss(program: Program) -> Iterator[Edit]:
    """Another value of the loss's type is given as a replica's loss."""

    def edit(graph: fx.Graph, replica: int, other: fx.Node) -> None:
        given: Any = graph.output_node().args[0]
        if isinstance(given, fx.Node):
            given = other
        elif "loss" in given:
            given = {**given, "loss": other}
        else:
            losses = given["losses"]
            given = {**given, "losses": (*losses[:replica], other, *losses[replica + 1 :])}
        graph.output_node().args = (given,)

    for replica, line in enumerate(_lines(program)):
        if not line:
            continue
        graph = line[0].graph
        given: Any = graph.output_node().args[0]
        loss = given if not isinstance(given, dict) else given["loss"] if "loss" in given else given["losses"][replica]
        for node in line if loss is not None else ():
            if node is not loss and is_value(node) and type_of(node) == type_of(loss):
                yield partial(edit, graph, replica, node)


@breaks
def give_another_replicas_result(program: Program) -> Iterator[Edit]:
    """The output names one replica's loss, gradient, new buffer, packed or reduced bucket as another's, too."""

    def changed(values: Sequence[Any], place: int) -> tuple[Any, ...]:
        return (*values[:place], values[place - 1], *values[place + 1 :])

    if program.graph is None or program.num_replicas == 1:
        return
    output = program.graph.output_node()
    found: Any = output.args[0]
    for key, values in found.items():
        named = values if isinstance(values, dict) else {None: values} if key == "losses" else dict(enumerate(values))
        for name, of_replicas in named.items():
            for place in range(len(of_replicas)):
                wrong: Any = changed(of_replicas, place)
                if wrong == of_replicas:  # an evaluation names no losses
                    continue
                if isinstance(values, dict):
                    wrong = {**values, name: wrong}
                elif key != "losses":
                    wrong = (*values[:name], wrong, *values[name + 1 :])
                yield partial(setattr, output, "args", ({**found, key: wrong},))


@breaks(is_judged=True)
def exchange_two_results(program: Program) -> Iterator[Edit]:
    """The output names two gradients or two new buffers of one type as each other's."""
    for graph in program.graphs() if program.stage < Stage.LOWERED else ():
        output = graph.output_node()
        found: Any = output.args[0]
        for key in ("gradients", "writes"):
            results = found.get(key, {})
            for one, other in pairs_alike(results, lambda name, results=results: kind_of(_values(results[name]))):  # type: ignore[misc]
                exchanged = {**results, one: results[other], other: results[one]}
                yield partial(setattr, output, "args", ({**found, key: exchanged},))


def _values(nodes: Any) -> Any:
    return nodes.meta["val"] if isinstance(nodes, fx.Node) else [node.meta["val"] for node in nodes if node is not None]


@breaks
def exchange_two_buckets_results(program: Program) -> Iterator[Edit]:
    """The output names two packed or reduced buckets as each other's, which the passes after it go by."""
    output = program.graph.output_node() if program.graph is not None else None
    for key in ("packed", "reduced") if output is not None else ():
        found: Any = output.args[0]  # type: ignore[union-attr]
        values = list(found.get(key, ()))
        for i in range(len(values) - 1):
            exchanged = (*values[:i], values[i + 1], values[i], *values[i + 2 :])
            yield partial(setattr, output, "args", ({**found, key: exchanged},))


@breaks(in_regions=True)
def note_another_type(program: Program) -> Iterator[Edit]:
    """A value is noted with another dtype, shape or strides than it has."""

    def edit(node: fx.Node, change: int) -> None:
        value = _noted(node)
        assert value is not None
        with value.fake_mode:
            other = [
                lambda: value.to(torch.float64 if value.dtype is not torch.float64 else torch.float32),
                lambda: value.unsqueeze(0),
                lambda: torch.empty_strided(value.shape, [2 * s for s in value.stride()], dtype=value.dtype),
            ][change]()
        is_pending = isinstance(node.meta["val"], ops.Pending)
        node.meta = {**node.meta, "val": ops.Pending(other) if is_pending else other}

    for graph in {id(graph): graph for graph in (*program.graphs(), *bodies(program))}.values():
        for node in graph.nodes:
            value = _noted(node)
            if node.op == "call_function" and value is not None and node.users:
                has_strides = any(size > 1 and stride for size, stride in zip(value.shape, value.stride(), strict=True))
                yield from (partial(edit, node, change) for change in range(3 if has_strides else 2))


def _noted(node: fx.Node) -> Any:
    value = node.meta.get("val")
    value = value.value if isinstance(value, ops.Pending) else value
    return value if isinstance(value, torch.Tensor) else None
