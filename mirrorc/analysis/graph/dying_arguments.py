"""Arguments of region calls that nothing reads afterwards."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.aliases import origins, shared_by, viewed
from mirrorc.ir import ops
from mirrorc.ir.nodes import is_compute, is_region_call, region_of
from mirrorc.ir.program import Program, Region
from mirrorc.torch_internals import sizes_key

aten = torch.ops.aten

PRODUCTS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default}
)
"""Operators whose result has new memory and is stored by all backends."""


def dying_places(program: Program, call: fx.Node) -> set[int]:
    """Indices of a region call's arguments that are contiguous products of other regions without another reader."""
    return {i for i, value in enumerate(call.args) if isinstance(value, fx.Node) and _dies(program, call, value)}


def _dies(program: Program, call: fx.Node, argument: fx.Node) -> bool:
    maker: Any = argument.args[0] if argument.target is operator.getitem else None
    if not isinstance(maker, fx.Node) or not is_region_call(maker):
        return False
    if set(argument.users) != {call} or sum(source is argument for source in call.args) != 1:
        return False
    if not argument.meta["val"].is_contiguous():  # elements of an expanded value share their memory
        return False
    same = [part for part in maker.users if part.args[1] == argument.args[1]]
    return same == [argument] and _is_unshared(program, maker, argument.args[1])


def _is_unshared(program: Program, maker: fx.Node, place: Any) -> bool:
    body = program.regions[region_of(maker)].graph_module.graph
    if unaliased_product(body, place) is not None:
        return True
    argument = reserved_argument(body, place)
    return argument is not None and getattr(maker.args[argument], "target", None) is ops.reserved


def unaliased_product(body: fx.Graph, place: Any) -> fx.Node | None:
    """The product that a region's result is or views. None if another result or an argument may alias it."""
    results: Any = body.output_node().args[0]
    product = stored_product(results[place])
    if product is None or any(origin.op == "placeholder" for origin in origins(results[place])):
        return None
    return None if _may_be_of_others(body, place, product) else product


def reserved_argument(body: fx.Graph, place: Any) -> int | None:
    """The index of the argument whose memory a result uses. None if other results may use that memory."""
    results: Any = body.output_node().args[0]
    owners = origins(results[place])
    argument = next(iter(owners))
    if len(owners) > 1 or argument.op != "placeholder" or _may_be_of_others(body, place, argument):
        return None
    return body.find_nodes(op="placeholder").index(argument)


def _may_be_of_others(body: fx.Graph, place: Any, value: fx.Node) -> bool:
    results: Any = body.output_node().args[0]
    numbers = _numbers(body)
    others = [other for i, other in enumerate(results) if i != place and other is not None]
    return any(numbers[origin] == numbers[value] for other in others for origin in origins(other))


def stored_product(value: Any) -> fx.Node | None:
    node = value if isinstance(value, fx.Node) and value.op == "call_function" else None
    while node is not None and node.target not in PRODUCTS:
        node = viewed(node)
    return node


def _numbers(body: fx.Graph) -> dict[fx.Node, int]:
    """Numbers values, equally if a backend may store them in the same memory.

    Backends merge equal operators and drop operators without effect.
    """
    numbers: dict[fx.Node, int] = {}
    known: dict[str, int] = {}
    varying: set[fx.Node] = set()
    for node in body.nodes:
        operands = fx.node.map_arg((node.args, node.kwargs), lambda source: f"%{numbers[source]}")
        key = node.name if node.op == "placeholder" else repr((str(node.target), operands))
        sources = [source for source in node.all_input_nodes if source in varying]
        if node.op == "placeholder" or sources:
            varying.add(node)
        may_be_left_out = len(sources) == 1 and node.target not in PRODUCTS and _type(node) == _type(sources[0])
        numbers[node] = numbers[sources[0]] if may_be_left_out else known.setdefault(key, len(known))
    return numbers


def _type(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (value.dtype, sizes_key(value.shape)) if isinstance(value, torch.Tensor) else None


def last_reader(part: fx.Node, regions: Mapping[str, Region]) -> fx.Node | None:
    """None without a reader, or if one may return a view of ``part`` or is neither a region call nor an operator."""
    readers: list[Any] = list(part.users)
    return max(readers) if readers and all(_uses_up(reader, part, regions) for reader in readers) else None


def _uses_up(reader: fx.Node, part: fx.Node, regions: Mapping[str, Region]) -> bool:
    if not is_region_call(reader):
        return is_compute(reader) and not shared_by(reader)
    body = regions[region_of(reader)].graph_module.graph
    placeholders = body.find_nodes(op="placeholder")
    arguments = {placeholders[place] for place, source in enumerate(reader.args) if source is part}
    return all(arguments.isdisjoint(origins(result)) for result in body.output_node().all_input_nodes)
