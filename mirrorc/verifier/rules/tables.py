"""Rules on a program's tables, and on references to them."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Pack
from mirrorc.ir.nodes import calls_to, is_region_call, name_of, region_of, replica_of
from mirrorc.ir.operation import operation_of
from mirrorc.ir.program import Program, Stage
from mirrorc.verifier.rules.rule import Order, Scope, Violation, rule


@rule(since=Stage.CAPTURED, order=Order.REFERENCES)
def graphs_are_those_of_the_stage(program: Program) -> Iterator[Violation]:
    """Up to OUTLINED there is a graph per shard shape, up to SCHEDULED the mirrored graph, in LOWERED a graph per
    device.
    """
    actual = (bool(program.shard_graphs), program.graph is not None, bool(program.device_graphs))
    expected = (
        program.stage < Stage.REPLICATED,
        Stage.REPLICATED <= program.stage < Stage.LOWERED,
        program.stage is Stage.LOWERED,
    )
    if actual != expected:
        kinds = ("graphs for shard shapes", "the mirrored graph", "graphs for devices")
        wanted, there = (
            " and ".join(kind for kind, has in zip(kinds, presence, strict=True) if has) or "none"
            for presence in (expected, actual)
        )
        yield Violation(f"the graphs of a {program.stage.name} program are {wanted}; here they are {there}")
    shards = program.shard_of_replica
    is_there = [shard is None or 0 <= shard < len(program.shard_graphs) for shard in shards]
    if expected[0] and (len(shards) != program.num_replicas or not all(is_there)):
        yield Violation(f"{program.num_replicas} replicas run the shard graphs {shards} of {len(program.shard_graphs)}")
    if expected[2] and list(program.device_graphs) != [device.name for device in program.devices]:
        yield Violation(f"there are graphs for {', '.join(program.device_graphs)}, which are not the devices in order")


@rule(since=Stage.CAPTURED, order=Order.REFERENCES)
def references_lead_somewhere(program: Program) -> Iterator[Violation]:
    """Variables, buckets, regions and gradients named by nodes and slots are in the program. No bucket is empty."""
    for bucket in program.buckets:
        if not bucket.slots:
            yield Violation(f"bucket {bucket.index} has no slots")
        for slot in bucket.slots:
            if slot.variable not in program.variables:
                yield Violation(f"bucket {bucket.index} has a slot for {slot.variable}, which is no variable")
    for graph in program.graphs():
        for node in graph.nodes:
            if node.op == "call_module" or operation_of(node.target) is not None:
                yield from _lost_references(program, node)


def _packs_of(program: Program, index: Any) -> Sequence[Pack]:
    is_there = isinstance(index, int) and 0 <= index < len(program.buckets)
    return program.buckets[index].packs if is_there else ()


def _lost_references(program: Program, node: fx.Node) -> Iterator[Violation]:
    variable = node.kwargs.get("variable")
    if variable is not None and variable not in program.variables:
        yield Violation(f"{node.name} is about {variable}, which is no variable of the program", node)
    buckets: Any = [node.kwargs["bucket"]] if "bucket" in node.kwargs else node.kwargs.get("buckets", ())
    for index in buckets:
        if not isinstance(index, int) or not 0 <= index < len(program.buckets):
            yield Violation(f"{node.name} is about bucket {index}, which there is not", node)
    pack = node.kwargs.get("pack")
    numbers = [known.number for index in buckets[:1] for known in _packs_of(program, index)]
    if pack is not None and pack not in numbers:
        yield Violation(f"{node.name} is about pack {pack} of bucket {buckets[0]}, which there is not", node)
    if is_region_call(node):
        region = program.regions.get(region_of(node))
        if region is None:
            yield Violation(f"{node.name} calls {region_of(node)}, which is no region of the program", node)
            return
        results: Any = region.graph_module.graph.output_node().args[0]
        gradients: Any = node.kwargs.get("gradients", {})
        for name, place in gradients.items():
            if not 0 <= place < len(results):
                yield Violation(f"{node.name} gives the gradient of {name} as result {place} of {len(results)}", node)


@rule(since=Stage.CAPTURED, order=Order.REFERENCES)
def operations_have_their_arguments(program: Program) -> Iterator[Violation]:
    """An operation has its required keywords and number of operands."""
    for graph in program.graphs():
        for node in graph.nodes:
            operation = operation_of(node.target)
            if operation is None:
                continue
            if not operation.required <= node.kwargs.keys():
                missing = [name for name in operation.keywords if name not in node.kwargs]
                yield Violation(f"{node.name} has no keyword {', '.join(missing)}, which {name_of(node)} needs", node)
                continue
            expected = operation.operands
            if isinstance(expected, str):
                expected = len(node.kwargs[expected])
            if expected is None:
                expected = max(_num_needed(node.target), len(node.args))
            is_other, takes_values = len(node.args) != expected, bool(operation.operands or _num_needed(node.target))
            if is_other or (takes_values and not all(isinstance(a, fx.Node) for a in node.args)):
                yield Violation(f"{node.name} takes {expected} values, but is given {len(node.args)}", node)


@functools.cache
def _num_needed(symbol: Callable[..., Any]) -> int:
    return sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in inspect.signature(symbol).parameters.values())


@rule(since=Stage.CAPTURED, order=Order.REFERENCES)
def arguments_are_in_order(program: Program) -> Iterator[Violation]:
    """A replica takes all of the program's arguments, in their order."""
    names = [argument.name for argument in program.arguments]
    for graph in program.graphs():
        taken: dict[int | None, list[str]] = {}
        for node in graph.find_nodes(op="placeholder"):
            taken.setdefault(None, []).append(str(node.target))
        for node in calls_to(graph, ops.argument):
            taken.setdefault(replica_of(node), []).append(str(node.kwargs["name"]))
        for replica, order in taken.items():
            is_same = order == names if replica is None else sorted(order) == sorted(names)
            if not is_same:
                where = "" if replica is None else f" on {program.devices[replica]}"
                yield Violation(f"the arguments are {', '.join(names)}, but{where} taken as {', '.join(order)}")


@rule(since=Stage.CAPTURED)
def slots_fit_their_variables(program: Program) -> Iterator[Violation]:
    """A slot has the shape, strides and number of elements of its variable."""
    for bucket in program.buckets:
        for slot in bucket.slots:
            variable = program.variables[slot.variable]
            if (slot.shape, slot.strides) != (variable.shape, variable.strides):
                yield Violation(
                    f"the slot of {slot.variable} is {list(slot.shape)}, the variable {list(variable.shape)}"
                )
            if slot.num_elements != math.prod(slot.shape):
                yield Violation(
                    f"the slot of {slot.variable} has {slot.num_elements} elements, not {math.prod(slot.shape)}"
                )


@rule(scope=Scope.PASS, order=Order.REFERENCES)
def tables_are_preserved(before: Program, after: Program, known: object = None) -> Iterator[Violation]:
    """A pass keeps the devices, the arguments, the variables, the numbers of examples of replicas and microbatches, and
    the kind of accumulation.
    """
    for name in ("devices", "arguments", "variables", "num_examples", "microbatches", "accumulation"):
        if getattr(before, name) != getattr(after, name):
            yield Violation(f"the pass has changed the program's {name}")
