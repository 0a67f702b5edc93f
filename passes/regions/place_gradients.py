"""Lets regions write gradients into their slots."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from mirrorc.analysis.gradients.region_gradients import calls_by_region, gradient_names, gradient_places
from mirrorc.custom_ops import out_products
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.buckets import Slot
from mirrorc.ir.gradient_forms import TABLE, matrix_product
from mirrorc.ir.graph_edits import call, copied, insert_write, remove_unused
from mirrorc.ir.names import identifier, unlike
from mirrorc.ir.nodes import is_region_call, region_of
from mirrorc.ir.program import Program, Region, Stage
from mirrorc.ir.type_inference import set_type
from mirrorc.ir.type_rules import any_value
from mirrorc.messages.wording import counted, listed
from mirrorc.torch_internals import lazy_graph_module


@dataclass(frozen=True)
class PlaceGradients:
    """Makes each region write its gradients into their slots, which become its arguments.

    A matrix product is computed into its slot. Other gradients are copied there, in a kernel that Inductor fuses with
    the operator before::

        bwd_0 = call_region(x, dy, region=bwd_0)          slot  = slot(bucket=0, variable=w)
        g     = bwd_0[0]                            ->    bwd_0 = call_region(x, dy, slot, region=bwd_0)
        output {gradients: {w: g}}                        g     = bwd_0[0]                # is the slot
                                                          output {gradients: {w: g}}

        region bwd_0(x, dy):                              region bwd_0(x, dy, w_slot):
            mm = aten.mm(dy, x)                     ->        mirrorc.mm_into(w_slot, dy, x)
            return [mm]                                       return [w_slot]

    If a linear layer and an embedding share their weight, the embedding's region adds the looked-up rows to the slot,
    without a dense table. Not with microbatches, where the order of additions would change::

        g0    = bwd_0[1]                                  g0    = bwd_0[1]                # is the slot
        bwd_1 = call_region(dx, i, g0, region=bwd_1)  ->  bwd_1 = call_region(dx, i, g0, region=bwd_1)
        g     = bwd_1[0]                                  g     = bwd_1[0]                # is the slot

        region bwd_1(dx, i, g0):                          region bwd_1(dx, i, g0):
            t   = aten.embedding_dense_backward(dx, i)        mirrorc.add_rows_into(g0, dx, i)
            sum = aten.add(g0, t)                   ->        return [g0]
            return [sum]

    Needs: a bucket plan and outlined regions.
    Guarantees: regions' results keep their indices and values. `pack` copies all other gradients.
    Source: TensorFlow's ScopedAllocator.
    """

    name: str = field(default="place-gradients", init=False)
    input_stage: Stage = field(default=Stage.OUTLINED, init=False)
    output_stage: Stage = field(default=Stage.OUTLINED, init=False)
    trains_only: ClassVar = True

    def run(self, program: Program) -> Program:
        if not program.buckets:
            raise PassError("MC4003: pass 'place-gradients' needs a bucket plan: run 'plan-buckets' before it")
        if any(node.target is ops.slot for graph in program.shard_graphs for node in graph.nodes):
            raise PassError(
                "MC4003: pass 'place-gradients' was given regions that write into slots already: leave one of them out"
            )
        slots = {slot.variable: (bucket.index, slot) for bucket in program.buckets for slot in bucket.slots}
        graphs = tuple(copied(graph) for graph in program.shard_graphs)
        names = {node: name for graph in graphs for node, name in gradient_names(graph).items()}
        regions = dict(program.regions)
        slot_of = {name: slot for name, (_, slot) in slots.items()}
        sums = added_rows(program, graphs, names, slot_of) if not program.shard_of_microbatch else []
        products = {total.product: total.variable for total in sums}
        left: list[str] = []
        for name, nodes in calls_by_region(graphs).items():
            to_add = [total.place for total in sums if total.region == name]
            places = {i: slot for i, slot in _places(nodes, names, products, slots, left).items() if i not in to_add}
            if places or to_add:
                regions[name] = _place(_adding_rows(program.regions[name], to_add), places)
                placed = program.evolve(regions=regions)
                for node in nodes:
                    _name_parts(node, products)
                    _pass_slots(placed, node, list(places), names | products, slots)
        placed = program.evolve(shard_graphs=graphs, regions=regions)
        ways = _ways_into_slots(placed, names)
        return placed.with_remarks(_counts(ways), is_kept=False).with_remarks(*_left_to_pack(ways, set(left)))


def _ways_into_slots(program: Program, names: Mapping[fx.Node, str]) -> dict[str, str]:
    """How each gradient is put into its slot; "pack" if any shard shape needs a copy by `pack`."""
    ways: dict[str, str] = {}
    for graph in program.shard_graphs:
        output: Any = graph.output_node().args[0]
        for variable, gradient in output["gradients"].items():
            way = _way_into_slot(program, gradient) if gradient in names else "pack"
            ways[variable] = "pack" if "pack" in (way, ways.get(variable)) else way
    return ways


def _counts(ways: Mapping[str, str]) -> str:
    counts = Counter(ways.values())
    gradients = counted(len(ways), "gradient")
    remark = f"of {gradients}, {counts['operator']} computed into their slots by the operator that makes them"
    remark += f", {counts['copy']} written there at the end of their region"
    remark += f", {counts['factors']} left as factors" if counts["factors"] else ""
    return remark + (f", {counts['pack']} left to pack" if counts["pack"] else "")


def _left_to_pack(ways: Mapping[str, str], used_twice: Collection[str]) -> list[str]:
    left = sorted(name for name, way in ways.items() if way == "pack")
    reasons = {
        "something else uses the gradient as well": [name for name in left if name in used_twice],
        "its region does not give it in every call": [name for name in left if name not in used_twice],
    }
    return [f"{listed(named)}: copied by pack, {why}" for why, named in reasons.items() if named]


def _way_into_slot(program: Program, gradient: fx.Node) -> str:
    if gradient.target in ops.FACTORED:
        return "factors"
    if gradient.target is not operator.getitem:
        return "pack"
    call, place = gradient.args
    result: Any = program.regions[region_of(call)].graph_module.graph.output_node().args[0][place]  # type: ignore[arg-type, index]
    if result.op == "placeholder":
        return "operator"
    is_written = result.target is torch.ops.aten.copy_.default and result.args[0].op == "placeholder"
    return "copy" if is_written else "pack"


def _places(
    nodes: list[fx.Node],
    names: Mapping[fx.Node, str],
    products: Mapping[fx.Node, str],
    slots: Mapping[str, tuple[int, Slot]],
    left: list[str],
) -> dict[int, Slot]:
    """The slots of results that are gradients or ``products`` in every call, by result index.

    Adds variables whose gradients have other uses to ``left``.
    """
    places: list[dict[int, str]] = []
    for node in nodes:
        direct, used = gradient_places(node, names)
        places.append(direct | _parts_of(node, products))
        left += used
    return {i: slots[name][1] for i, name in places[0].items() if all(i in direct for direct in places)}


def _parts_of(node: fx.Node, products: Mapping[fx.Node, str]) -> dict[int, str]:
    return {part.args[1]: products[part] for part in node.users if part in products}  # type: ignore[misc]


def _name_parts(node: fx.Node, products: Mapping[fx.Node, str]) -> None:
    gradients: Any = node.kwargs["gradients"]
    parts = {variable: place for place, variable in _parts_of(node, products).items()}
    node.kwargs = {**node.kwargs, "gradients": {**gradients, **parts}}


def _adding_rows(region: Region, places: Sequence[int]) -> Region:
    graph = copied(region.graph_module.graph)
    results: Any = list(graph.output_node().args[0])  # type: ignore[arg-type]
    for place in places:
        before, table = results[place].args
        rows, indices, _, padding_idx, _ = table.args
        operands = (before, rows, indices, padding_idx)
        insert_write(results[place], out_products.add_rows_into, operands, table)
        results[place] = before
    graph.output_node().args = (tuple(results),)
    remove_unused(graph)
    return replace(region, graph_module=lazy_graph_module({}, graph, region.name))


def _place(region: Region, places: Mapping[int, Slot]) -> Region:
    graph = copied(region.graph_module.graph)
    results = list(graph.output_node().args[0])  # type: ignore[arg-type]
    last_placeholder = graph.find_nodes(op="placeholder")[-1:]
    with any_value(graph).fake_mode:
        like = [(slot, results[index].meta["val"]) for index, slot in places.items()]
        values = [torch.empty_strided(s.shape, s.strides, dtype=v.dtype, device=v.device) for s, v in like]
    taken = {str(node.target) for node in graph.find_nodes(op="placeholder")}
    for (index, slot), value in zip(places.items(), values, strict=True):
        name = unlike(taken, f"slot_{identifier(slot.variable)}")
        taken.add(name)
        with graph.inserting_after(last_placeholder[0]) if last_placeholder else graph.inserting_before():
            argument = graph.placeholder(name)
        last_placeholder = [argument]
        argument.meta["val"] = value
        results[index] = _write(graph, results[index], argument)
    graph.output_node().args = (tuple(results),)
    remove_unused(graph)
    graph.lint()
    return replace(region, graph_module=lazy_graph_module({}, graph, region.name))


def _write(graph: fx.Graph, gradient: fx.Node, slot: fx.Node) -> fx.Node:
    product = matrix_product(gradient)
    if product is not None and slot.meta["val"].is_contiguous():
        insert_write(product, out_products.mm_into, (slot, *product.args), product)
        return slot
    with graph.inserting_after(gradient):
        name = slot.name.replace("slot_", "write_", 1)
        written = graph.create_node("call_function", torch.ops.aten.copy_.default, (slot, gradient), name=name)
    written.meta = {**gradient.meta, "val": slot.meta["val"]}
    return written


def _pass_slots(
    program: Program,
    node: fx.Node,
    indices: list[int],
    names: Mapping[fx.Node, str],
    slots: Mapping[str, tuple[int, Slot]],
) -> None:
    of_index = {part.args[1]: names[part] for part in node.users if part in names}
    body = program.regions[region_of(node)].graph_module.graph
    placeholders = body.find_nodes(op="placeholder")[len(node.args) :]
    arguments = []
    for index, placeholder in zip(indices, placeholders, strict=True):
        bucket, slot = slots[of_index[index]]
        with node.graph.inserting_before(node):
            argument = call(node.graph, ops.slot, (), {"bucket": bucket, "variable": slot.variable})
        argument.meta["val"] = placeholder.meta["val"]
        arguments.append(argument)
    node.args = (*node.args, *arguments)
    set_type(program, node)  # gradients lie as their slots do
    for part in node.users:
        set_type(program, part)


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
