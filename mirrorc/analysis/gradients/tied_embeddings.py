"""Gradients of weights shared by an embedding and a linear layer."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.gradients.region_gradients import calls_by_region, gradient_places
from mirrorc.ir.buckets import Slot
from mirrorc.ir.gradient_forms import TABLE, matrix_product
from mirrorc.ir.nodes import is_region_call, region_of
from mirrorc.ir.program import Program


@dataclass(frozen=True)
class AddedRows:
    """Rows that ``region`` adds to ``product``, a result of another region. The sum is result ``place`` of ``region``."""

    variable: str
    region: str
    place: int
    product: fx.Node


def added_rows(
    program: Program, graphs: Sequence[fx.Graph], names: Mapping[fx.Node, str], slots: Mapping[str, Slot]
) -> list[AddedRows]:
    """Gradients of tied embeddings that add a lookup's rows to a matrix product.

    Both regions must run once, and the slot must have the product's layout.
    """
    calls = calls_by_region(graphs)
    once = {name: nodes[0] for name, nodes in calls.items() if len(nodes) == 1}
    added: list[AddedRows] = []
    for name, node in once.items():
        results: Any = program.regions[name].graph_module.graph.output_node().args[0]
        for place, variable in gradient_places(node, names)[0].items():
            argument = _argument_with_rows(results[place])
            product = node.args[argument] if argument is not None else None
            if not isinstance(product, fx.Node) or results.count(results[place]) > 1:
                continue
            is_alike = product.meta["val"].stride() == slots[variable].strides
            if is_alike and _is_product_for(program, product, node, once):
                added.append(AddedRows(variable, name, place, product))
    return added


def _argument_with_rows(gradient: fx.Node) -> int | None:
    if gradient.target is not torch.ops.aten.add.Tensor or gradient.kwargs or len(gradient.users) != 1:
        return None
    before, table = gradient.args
    if not isinstance(before, fx.Node) or not isinstance(table, fx.Node) or before.op != "placeholder":
        return None
    if len(before.users) != 1 or TABLE.recognize(table) is None:
        return None
    values = [node.meta["val"] for node in (before, table, gradient)]
    is_alike = len({(value.shape, value.stride(), value.dtype) for value in values}) == 1
    return gradient.graph.find_nodes(op="placeholder").index(before) if is_alike else None


def _is_product_for(program: Program, value: fx.Node, reader: fx.Node, once: Mapping[str, fx.Node]) -> bool:
    maker: Any = value.args[0] if value.target is operator.getitem else None
    if not isinstance(maker, fx.Node) or not is_region_call(maker) or region_of(maker) not in once:
        return False
    if set(value.users) != {reader} or sum(source is value for source in reader.args) != 1:
        return False
    results: Any = program.regions[region_of(maker)].graph_module.graph.output_node().args[0]
    result = results[value.args[1]]
    is_used_once = results.count(result) == 1 and sum(part.args[1] == value.args[1] for part in maker.users) == 1
    return is_used_once and matrix_product(result) is not None
