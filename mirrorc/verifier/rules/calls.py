"""Rules on examples, symbolic sizes, outputs, evaluations, and values that forward saves for backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.aliases import ViewedVariables
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, is_region_call, name_of, replica_of
from mirrorc.ir.program import Accumulation, ArgumentKind, Program, Stage, placeholders_of
from mirrorc.ir.routes import replica_of_graph
from mirrorc.printing.printed_values import type_of
from mirrorc.torch_internals import is_symbolic, raw_symbols, size_key, sizes_key, symbols_in
from mirrorc.verifier.rules.rule import Order, Scope, Violation, losses_of, rule, scopes

_OF_FORWARD_AND_BACKWARD = (ops.argument, ops.slot, ops.check, ops.gather, ops.keep, ops.write)


@rule(since=Stage.CAPTURED, order=Order.REFERENCES)
def some_replica_has_examples(program: Program) -> Iterator[Violation]:
    """At least one replica of the worker, or another worker, has examples. Before replication, exactly the replicas
    with examples have a graph.
    """
    if not program.present and not program.workers.are_several:
        yield Violation(f"the numbers of examples are {program.num_examples}: there is nothing to learn from")
    if program.stage < Stage.REPLICATED:
        for replica, shard in enumerate(program.shard_of_replica):
            if (shard is not None) != (replica in program.present):
                runs, has = ("runs no graph", "has") if shard is None else (f"runs graph {shard}", "has no")
                yield Violation(f"replica {replica} {runs}, but {has} examples")


@rule(since=Stage.REPLICATED, order=Order.REFERENCES)
def replicas_without_examples_run_nothing(program: Program) -> Iterator[Violation]:
    """A replica without examples has no arguments, regions, slots, factors, checks, collectives of the model, outputs,
    buffer writes or loss. All replicas take part in reductions, commits and updates.
    """
    for where, graph, _ in scopes(program):
        for node in graph.nodes:
            if node.op == "output" or not _is_of_forward_or_backward(node):
                continue
            owner = replica_of(node)
            replica = replica_of_graph(program, graph) if owner is None else owner
            if replica not in program.present:
                yield Violation(f"{name_of(node)} runs on {where(owner)}, which has no examples", node)
        output: Any = graph.output_node().args[0]
        here = [replica_of_graph(program, graph)] if program.graph is None else range(program.num_replicas)
        losses = output["losses"] if isinstance(output, dict) else [output]
        for replica, loss in zip(here, losses if program.has_loss else (), strict=False):  # an evaluation has none
            if (loss is not None) != (replica in program.present):
                has = "gives no loss, but has" if loss is None else "gives a loss, but has no"
                yield Violation(f"{where(replica)} {has} examples", graph.output_node())


def _is_of_forward_or_backward(node: fx.Node) -> bool:
    is_operation = any(node.target in some for some in (_OF_FORWARD_AND_BACKWARD, ops.FACTORED, ops.MEETINGS))
    return is_operation or node.op == "placeholder" or is_region_call(node)


@rule(since=Stage.CAPTURED)
def losses_are_for_training(program: Program) -> Iterator[Violation]:
    """A program with a loss weight trains. It returns a loss, or begins with gradients of outputs. Any other program
    evaluates: it has no buckets, update rules, losses, gradients or regions of backward.
    """
    for graph in program.shard_graphs:
        output: Any = graph.output_node().args[0]
        if program.has_loss is not isinstance(output["loss"], fx.Node):
            yield Violation(f"the graph of a shard returns the loss {output['loss']}: {_kind(program)}")
        if output["gradients"] and not program.trains:
            yield Violation(f"the graph of a shard returns gradients: {_kind(program)}")
    for where, graph, replicas in scopes(program):
        if losses_of(graph) and not program.has_loss:
            yield Violation(f"{where(replicas[0])} returns a loss: {_kind(program)}")
    if not program.trains:
        yield from _signs_of_training(program)


def _kind(program: Program) -> str:
    return "the program trains" if program.trains else "the program evaluates"


def _signs_of_training(program: Program) -> Iterator[Violation]:
    if program.buckets:
        yield Violation(f"{_kind(program)}, but has a plan of {len(program.buckets)} buckets")
    if program.accumulation not in (Accumulation.NONE, Accumulation.FORWARD):
        yield Violation(f"{_kind(program)}, but is {program.accumulation.value}")
    for variable in program.variables.values():
        if variable.update is not None:
            yield Violation(f"{_kind(program)}, but the optimizer updates {variable.name}")
    for region in program.regions.values():
        if region.phase == "backward" and not program.takes_tangents:
            yield Violation(f"{_kind(program)}, but {region.name} is a region of backward")
    if program.stage < Stage.UPDATED:
        return
    for where, graph, replicas in scopes(program):
        if next(calls_to(graph, *ops.UPDATES), None) is not None:
            yield Violation(f"{where(replicas[0])} updates parameters: {_kind(program)}")


_Key = tuple[str, str, object, object]


@rule(since=Stage.CAPTURED, order=Order.OWNERS)
def outputs_are_gathered_alike(program: Program) -> Iterator[Violation]:
    """Every replica with examples gathers the same outputs once, in one way and dtype. Parts of a concatenated output
    have a row for each example, and agree in other dimensions. Parts of an averaged or summed output have one shape.
    """
    each: list[tuple[str, list[fx.Node], int | None]] = []
    sizes = program.num_examples if len(program.num_examples) == program.num_replicas else ()
    for i, graph in enumerate(program.shard_graphs):
        size = next((size for shard, size in _sizes_of_graphs(program) if shard == i), None) if sizes else None
        each.append((f"the graph of shard {i}", list(calls_to(graph, ops.gather)), size))
    for i, (name_of_replica, graph, replicas) in enumerate(scopes(program)):
        gathers = list(calls_to(graph, ops.gather))
        for r in replicas:
            if (i if r is None else r) not in program.present:
                continue  # `replicas_without_examples_run_nothing` reports it
            size = sizes[i if r is None else r] if sizes else None
            each.append((name_of_replica(r), [node for node in gathers if replica_of(node) == r], size))
    first: dict[str, _Key] | None = None
    for where, nodes, num_examples in each:
        keys: dict[str, _Key] = {}
        for node in nodes:
            name = str(node.kwargs.get("output"))
            if not node.all_input_nodes:
                continue  # `operations_have_their_arguments` reports it
            if name in keys:
                yield Violation(f"{where} gathers {name} twice", node)
            keys[name] = _key(node)
            if keys[name][0] == "concatenated" and not _has_rows(program, node, num_examples):
                yield Violation(f"{where} gathers {name} along the batch, but it has no row for each example", node)
        if first is None:
            first = keys
        for name in {**first, **keys}:
            if first.get(name) != keys.get(name):
                at = next((n for n in nodes if str(n.kwargs.get("output")) == name), nodes[0] if nodes else None)
                yield Violation(f"{where} gathers {name} otherwise than {each[0][0]}, or not at all", at)


def _sizes_of_graphs(program: Program) -> Iterator[tuple[int | None, int]]:
    if not program.shard_of_microbatch:
        yield from zip(program.shard_of_replica, program.num_examples, strict=False)
    for shards, sizes in zip(program.shard_of_microbatch, program.microbatches, strict=False):
        yield from zip(shards, sizes, strict=False)


def _has_rows(program: Program, node: fx.Node, num_examples: int | None) -> bool:
    value = node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor):
        return True
    size = size_key(value.shape[0]) if value.dim() else None
    if size is None or isinstance(size, int):
        return size is not None and num_examples in (None, size)
    return size in _symbols_of_examples(program, node.graph)


def _symbols_of_examples(program: Program, graph: fx.Graph) -> set[Any]:
    names = {argument.name for argument in program.arguments if argument.has_examples}
    arguments = [*graph.find_nodes(op="placeholder"), *calls_to(graph, ops.argument)]
    values = [node.meta.get("val") for node in arguments if node.kwargs.get("name", node.target) in names]
    return {size_key(value.shape[0]) for value in values if isinstance(value, torch.Tensor)}


def _key(node: fx.Node) -> _Key:
    how, value = str(node.kwargs.get("how")), node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor):
        return how, str(node.kwargs.get("output")), None, None
    whole = sizes_key(value.shape)
    shape = {"concatenated": whole[1:], "averaged": whole, "summed": whole}.get(how)
    return how, str(node.kwargs.get("output")), value.dtype, shape


@rule(since=Stage.CAPTURED, order=Order.REFERENCES)
def sizes_are_arguments(program: Program) -> Iterator[Violation]:
    """Each symbol in the sizes of a captured graph is an argument of the program. Operators use the values of such
    arguments, never symbols.
    """
    if program.stage is Stage.CAPTURED:
        size_names = {argument.name for argument in program.arguments if argument.kind is ArgumentKind.SIZE}
        for i, graph in enumerate(program.shard_graphs):
            yield from _unknown_sizes(graph, f"the graph of shard {i}", size_names)


@rule(since=Stage.OUTLINED, scope=Scope.GRAPH, order=Order.REFERENCES)
def regions_take_their_sizes(program: Program, graph: fx.Graph) -> Iterator[Violation]:
    """Each symbol in the sizes of a region is an argument of the region. Operators use the values of such arguments,
    never symbols.
    """
    name = next((name for name, region in program.regions.items() if region.graph_module.graph is graph), None)
    if name is not None:
        yield from _unknown_sizes(graph, f"region {name}", None)


def _unknown_sizes(graph: fx.Graph, where: str, names: set[str] | None) -> Iterator[Violation]:
    placeholders = [node for node in graph.find_nodes(op="placeholder") if is_symbolic(node.meta.get("val"))]
    known = {size_key(node.meta["val"]) for node in placeholders if names is None or node.target in names}
    for node in graph.nodes:
        raw = raw_symbols([node.args, node.kwargs])
        if raw:
            yield Violation(f"{where} gives {node.name} the symbol {raw[0]}, which is known to no device", node)
        unknown = symbols_in(node.meta.get("val")) - known
        if unknown:
            yield Violation(f"{where} is not told {sorted(map(str, unknown))[0]}, a size of {node.name}", node)


@rule(since=Stage.CAPTURED, order=Order.OWNERS)
def values_are_kept_alike(program: Program) -> Iterator[Violation]:
    """Every replica with examples saves the same values for backward, numbered from 0 in the order of the graph, with
    equal dtypes and ranks. A program that has a backward itself saves none.
    """
    first: tuple[str, list[fx.Node]] | None = None
    for where, nodes in _kept(program):
        if nodes and (program.trains or program.takes_tangents):
            yield Violation(f"{where} keeps values, but the program has the backward that reads them", nodes[0])
        numbers = [node.kwargs.get("number") for node in nodes]
        if numbers != [*range(len(nodes))]:
            yield Violation(f"{where} keeps values under the numbers {numbers}, not {[*range(len(nodes))]}", nodes[0])
        first = first or (where, nodes)
        if len(nodes) != len(first[1]):
            yield Violation(
                f"{where} keeps {len(nodes)} values, and {first[0]} {len(first[1])}",
                next(iter(nodes or first[1]), None),
            )
        for node, other in zip(nodes, first[1], strict=False):
            if _type_in_forward(node) != _type_in_forward(other):
                number = node.kwargs.get("number")
                yield Violation(
                    f"{where} keeps {_kept_type(node)} as value {number}, and {first[0]} {_kept_type(other)}", node
                )


def _kept(program: Program) -> Iterator[tuple[str, list[fx.Node]]]:
    for i, graph in enumerate(program.shard_graphs):
        yield f"the graph of shard {i}", list(calls_to(graph, ops.keep))
    for place, (name_of_replica, graph, replicas) in enumerate(scopes(program)):
        nodes = list(calls_to(graph, ops.keep))
        for replica in replicas:
            if (place if replica is None else replica) in program.present:  # others run nothing
                yield name_of_replica(replica), [node for node in nodes if replica_of(node) == replica]


def _type_in_forward(node: fx.Node) -> tuple[torch.dtype, int] | None:
    value = node.all_input_nodes[0].meta.get("val") if node.all_input_nodes else None
    return (value.dtype, value.dim()) if isinstance(value, torch.Tensor) else None


def _kept_type(node: fx.Node) -> str:
    return type_of(node.all_input_nodes[0].meta.get("val")) if node.all_input_nodes else "nothing"


@rule(since=Stage.CAPTURED)
def kept_values_have_memory_of_their_own(program: Program) -> Iterator[Violation]:
    """A value saved for backward shares no memory with variables, arguments or reserved memory, because these may be
    written before backward.
    """
    variables = ViewedVariables(program)
    for graph in program.graphs():
        for node in calls_to(graph, ops.keep):
            for owner in (owner for value in node.all_input_nodes for owner in variables.owners(value)):
                if owner.op == "placeholder" or owner.target in (ops.read, ops.argument, ops.reserved):
                    name = owner.kwargs.get("variable") or owner.kwargs.get("name") or owner.name
                    yield Violation(f"value {node.kwargs.get('number')} is kept in memory of {name}", node)


@rule(since=Stage.CAPTURED)
def gradients_of_outputs_are_used(program: Program) -> Iterator[Violation]:
    """A backward that begins with gradients of outputs reads each of them."""
    names = {argument.name for argument in program.arguments if argument.kind is ArgumentKind.TANGENT}
    for i, graph in enumerate(program.shard_graphs):
        for node in placeholders_of(graph, program.arguments, ArgumentKind.TANGENT):
            if not node.users:
                yield Violation(f"the graph of shard {i} takes {node.target}, and nothing reads it", node)
    for where, graph, _ in scopes(program):
        for node in [*graph.find_nodes(op="placeholder"), *calls_to(graph, ops.argument)]:
            if node.kwargs.get("name", node.target) in names and not node.users:
                yield Violation(f"{where(replica_of(node))} takes {node.name}, and nothing reads it", node)
