"""Copies, inserts and removes nodes."""

from __future__ import annotations

import contextlib
import gc
import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from mirrorc.ir.names import filled, identifier, of_replica
from mirrorc.ir.nodes import is_compute, operation_name, part_keywords
from mirrorc.ir.operation import Kind, operation_of
from mirrorc.ir.program import Program
from mirrorc.ir.type_inference import set_type
from mirrorc.torch_internals import add_node, is_operator, writes_argument


def copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy_into(copy, graph))
    return copy


def copy_into(graph: fx.Graph, source: fx.Graph) -> Any:
    values: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node.op != "output":
            values[node] = copy_node(graph, node, values)
    return fx.node.map_arg(source.output_node().args[0], values.__getitem__)


def copy_node(
    graph: fx.Graph, node: fx.Node, values: Mapping[fx.Node, fx.Node], *, name: str | None = None, **more: Any
) -> fx.Node:
    args: Any = node.args
    kwargs: Any = node.kwargs
    if node.all_input_nodes:
        args, kwargs = fx.node.map_arg(args, values.__getitem__), fx.node.map_arg(kwargs, values.__getitem__)
    keywords = {**kwargs, **more} if more else kwargs
    is_valid = name is None or name == node.name
    copy = add_node(graph, node.op, node.target, args, keywords, name or node.name, node.type, is_valid=is_valid)
    copy.meta.update(node.meta)  # faster than an assignment to the node's attribute
    return copy


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> fx.Node:
    keywords = dict(kwargs or {})
    return add_node(graph, "call_function", target, args, keywords, _name(target, args, keywords))


def _name(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    record, of_part = operation_of(target), part_keywords(target, args)
    stem = filled(record.stem, args, kwargs) if record is not None else ""
    if of_part is not None:
        record, kwargs = of_part
        stem = filled(record.called, (), kwargs)
    if is_operator(target) or (record is not None and record.kind is Kind.COMPUTE):
        operand = next((a.name for a in args if isinstance(a, fx.Node)), "")
        stem = stem or f"{operand}_{operation_name(target)}"
    return identifier(of_replica(stem or operation_name(target), kwargs.get("replica")))


def insert(
    program: Program, before: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> fx.Node:
    with before.graph.inserting_before(before):
        node = call(before.graph, target, args, kwargs)
    set_type(program, node)
    return node


def insert_write(before: fx.Node, target: Any, operands: tuple[Any, ...], maker: fx.Node) -> None:
    with before.graph.inserting_before(before):
        write = before.graph.create_node("call_function", target, operands, name=f"{maker.name}_into")
    write.meta = source_of(maker)


def source_of(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}


def remove_unused(graph: fx.Graph) -> None:
    """Operations of the IR stay, for their effects."""
    for node in reversed(list(graph.nodes)):
        if node.users:
            continue
        if node.target is operator.getitem or (is_compute(node) and not writes_argument(node.target)):
            graph.erase_node(node)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """The collector would search long-lived traces and graphs again and again: a fifth of the time of `mirrorc.parse`."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
