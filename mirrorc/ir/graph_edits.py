"""Small edits of graphs that passes share."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx

from mirrorc.ir.names import filled, identifier, of_replica
from mirrorc.ir.nodes import is_compute, operation_name, words_of_part
from mirrorc.ir.operation import Kind, operation_of
from mirrorc.ir.program import Program
from mirrorc.ir.type_inference import set_type
from mirrorc.torch_internals import add_node, is_operator, writes_argument


def copied(graph: fx.Graph) -> fx.Graph:
    """Copies a graph; the names, the order and the metadata (`node.meta`) of its nodes stay."""
    copy = fx.Graph()
    copy.output(copy_into(copy, graph))
    return copy


def copy_into(graph: fx.Graph, source: fx.Graph) -> Any:
    """Copies a graph's nodes to the end of another graph, which has no output yet.

    Returns the output of the source, with the new nodes in place of the old ones.
    """
    values: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node.op != "output":
            values[node] = copy_node(graph, node, values)
    return fx.node.map_arg(source.output_node().args[0], values.__getitem__)


def copy_node(
    graph: fx.Graph,
    node: fx.Node,
    values: Mapping[fx.Node, fx.Node],
    *,
    name: str | None = None,
    **more: Any,
) -> fx.Node:
    """Copies a node to a graph's point of insertion.

    Args:
        graph: the graph that gets the node.
        node: of another graph.
        values: for each node that it uses, the value in ``graph`` that takes its place.
        name: a new name; by default the name stays.
        more: additional keyword arguments.
    """
    args: Any = node.args
    kwargs: Any = node.kwargs
    if node.all_input_nodes:
        args, kwargs = fx.node.map_arg(args, values.__getitem__), fx.node.map_arg(kwargs, values.__getitem__)
    given = {**kwargs, **more} if more else kwargs
    is_valid = name is None or name == node.name
    copy = add_node(graph, node.op, node.target, args, given, name or node.name, node.type, is_valid=is_valid)
    copy.meta.update(node.meta)  # faster than an assignment to the node's attribute
    return copy


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> fx.Node:
    """Calls an operation at the graph's point of insertion; the node gets the name that the printed program shows."""
    given = dict(kwargs or {})
    return add_node(graph, "call_function", target, args, given, _name(target, args, given))


def _name(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    found, of_part = operation_of(target), words_of_part(target, args)
    stem = filled(found.stem, args, kwargs) if found is not None else ""
    if of_part is not None:
        found, kwargs = of_part
        stem = filled(found.called, (), kwargs)
    if is_operator(target) or (found is not None and found.kind is Kind.COMPUTE):
        operand = next((a.name for a in args if isinstance(a, fx.Node)), "")
        stem = stem or f"{operand}_{operation_name(target)}"
    return identifier(of_replica(stem or operation_name(target), kwargs.get("replica")))


def insert(
    program: Program, before: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> fx.Node:
    """Inserts a call before a node, and gives it the type that follows from its arguments.

    Args:
        program: for its tables of variables, buckets and regions.
        before: a node of the graph to insert into.
        target: an operation of `mirrorc.ir.ops`, or an operator of torch that writes nothing.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        TypeError: the operation cannot take these arguments.
    """
    with before.graph.inserting_before(before):
        node = call(before.graph, target, args, kwargs)
    set_type(program, node)
    return node


def remove_unused(graph: fx.Graph) -> None:
    """Removes the operators of torch that have no uses and write nothing, and unused parts of their results.

    Operations of the IR stay: some, such as checks, are there for what they do.
    """
    for node in reversed(list(graph.nodes)):
        if (is_compute(node) or node.target is operator.getitem) and not node.users and not _writes(node):
            graph.erase_node(node)


def _writes(node: fx.Node) -> bool:
    return is_operator(node.target) and writes_argument(node.target)
