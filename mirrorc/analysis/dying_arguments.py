"""Finds arguments of regions' calls that nothing reads afterwards, so that a region may write into their memory."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.aliases import origins, viewed
from mirrorc.ir.nodes import is_region_call, region_of
from mirrorc.ir.program import Program

aten = torch.ops.aten

PRODUCTS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default}
)
"""Operators that always give new memory, and whose result is stored, whatever a backend fuses."""


def dying_places(program: Program, call: fx.Node) -> set[int]:
    """The places of a call's arguments whose memory is that of no other value and is read by nothing but this call.

    These are results of regions, products that no other result of their region may share memory with, and contiguous. What a
    later call reads, or a caller is handed, is not among them: each call of a region is looked at by itself.
    """
    return {i for i, given in enumerate(call.args) if isinstance(given, fx.Node) and _dies(program, call, given)}


def _dies(program: Program, call: fx.Node, given: fx.Node) -> bool:
    maker: Any = given.args[0] if given.target is operator.getitem else None
    if not isinstance(maker, fx.Node) or not is_region_call(maker):
        return False
    if set(given.users) != {call} or sum(source is given for source in call.args) != 1:
        return False
    if not given.meta["val"].is_contiguous():  # elements of an expanded value share their memory
        return False
    same = [part for part in maker.users if part.args[1] == given.args[1]]
    return same == [given] and _is_own(program.regions[region_of(maker)].graph_module.graph, given.args[1])


def _is_own(body: fx.Graph, place: Any) -> bool:
    """Whether a region's result is a product that shares its memory with no other result and no argument."""
    results: Any = body.output_node().args[0]
    product = stored_product(results[place])
    if product is None or any(origin.op == "placeholder" for origin in origins(results[place])):
        return False
    numbers = _numbers(body)
    others = [
        origin for i, other in enumerate(results) if i != place and other is not None for origin in origins(other)
    ]
    return all(numbers[origin] != numbers[product] for origin in others)


def stored_product(value: Any) -> fx.Node | None:
    """The product that a value is, or that it is a view of."""
    found = value if isinstance(value, fx.Node) and value.op == "call_function" else None
    while found is not None and found.target not in PRODUCTS:
        found = viewed(found)
    return found


def _numbers(body: fx.Graph) -> dict[fx.Node, int]:
    """Equal numbers for values that a backend may keep in the same memory: it may make one operator of equal ones, and leave out
    one that changes nothing, as may one with a single operand that varies, such as a product with ones.
    """
    numbers: dict[fx.Node, int] = {}
    known: dict[str, int] = {}
    varying: set[fx.Node] = set()
    for node in body.nodes:
        given = fx.node.map_arg((node.args, node.kwargs), lambda source: f"%{numbers[source]}")
        key = node.name if node.op == "placeholder" else repr((str(node.target), given))
        sources = [source for source in node.all_input_nodes if source in varying]
        if node.op == "placeholder" or sources:
            varying.add(node)
        may_be_left_out = len(sources) == 1 and node.target not in PRODUCTS and _type(node) == _type(sources[0])
        numbers[node] = numbers[sources[0]] if may_be_left_out else known.setdefault(key, len(known))
    return numbers


def _type(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (value.dtype, value.shape) if isinstance(value, torch.Tensor) else None
