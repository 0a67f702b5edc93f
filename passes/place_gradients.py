"""Lets backward write gradients straight into their slots, so that packing copies nothing."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from mirrorc import kernels, ops
from mirrorc.errors import PassError
from mirrorc.graphs import call, copied
from mirrorc.inputs import identifier
from mirrorc.program import Program, Region, Slot, Stage
from mirrorc.torch_internals import lazy_graph_module
from mirrorc.value_types import set_type

_VIEWS = (
    torch.ops.aten.t.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
)
Calls = dict[str, list[fx.Node]]


@dataclass(frozen=True)
class PlaceGradients:
    """Gives regions the slots of their gradients as arguments and writes each gradient there, inside of the region.

    A matrix product, such as the gradient of a linear layer's weight, is computed into the slot. Any other gradient is
    copied into it at the region's end, which Inductor fuses with the operator that makes it::

        bwd_0 = call_region(x, dy, region=bwd_0)          slot  = slot(bucket=0, variable=w)
        g     = bwd_0[0]                            ->    bwd_0 = call_region(x, dy, slot, region=bwd_0)
        output {gradients: {w: g}}                        g     = bwd_0[0]                # is the slot
                                                          output {gradients: {w: g}}

        region bwd_0(x, dy):                              region bwd_0(x, dy, w_slot):
            mm = aten.mm(dy, x)                     ->        mirrorc.mm_into(w_slot, dy, x)
            return [mm]                                       return [w_slot]

    Needs: a bucket plan and outlined regions.
    Guarantees: a region's outputs keep their places and values. A gradient that something else in the program uses as well,
        or that only some calls of a shared region give, stays as it is and is copied by `pack`.
    Source: TensorFlow's ScopedAllocator gave its collectives one buffer in this way.
    """

    name: str = field(default="place-gradients", init=False)
    input_stage: Stage = field(default=Stage.OUTLINED, init=False)
    output_stage: Stage = field(default=Stage.OUTLINED, init=False)

    def run(self, program: Program) -> Program:
        if not program.buckets:
            raise PassError("pass 'place-gradients' needs a bucket plan: run 'plan-buckets' before it")
        slots = {slot.variable: (bucket.index, slot) for bucket in program.buckets for slot in bucket.slots}
        graphs = tuple(copied(graph) for graph in program.shard_graphs)
        calls: Calls = {}
        names: dict[fx.Node, str] = {}
        for graph in graphs:
            names |= _gradient_names(graph)
            for node in ops.calls(graph, ops.call_region):
                calls.setdefault(str(node.kwargs["region"]), []).append(node)
        regions = dict(program.regions)
        left: list[str] = []
        for name, nodes in calls.items():
            places = _places(nodes, names, slots, left)
            if places:
                regions[name] = _place(program.regions[name], places)
                placed = program.evolve(regions=regions)
                for node in nodes:
                    _pass_slots(placed, node, list(places), names, slots)
        remarks = (
            [f"{', '.join(sorted(set(left)))}: copied by pack, something else uses the gradient as well"]
            if left
            else []
        )
        return program.evolve(shard_graphs=graphs, regions=regions, remarks=(*program.remarks, *remarks))


def _gradient_names(graph: fx.Graph) -> dict[fx.Node, str]:
    output: Any = graph.output_node().args[0]
    found: dict[fx.Node, str] = {}
    shared: set[fx.Node] = {output["loss"], *output["writes"].values()}
    for name, node in output["gradients"].items():
        if node in found:
            shared.add(node)
        found[node] = name
    return {node: name for node, name in found.items() if node not in shared}


def _places(
    nodes: list[fx.Node], names: Mapping[fx.Node, str], slots: Mapping[str, tuple[int, Slot]], left: list[str]
) -> dict[int, Slot]:
    """Which outputs of a region are gradients in every call of it, and a slot of their shape."""
    found: list[dict[int, Slot]] = []
    for node in nodes:
        own: dict[int, Slot] = {}
        for part in node.users:
            if part.target is operator.getitem and part in names:
                if all(user.op == "output" for user in part.users):
                    own[part.args[1]] = slots[names[part]][1]  # type: ignore[index]
                else:
                    left.append(names[part])
        found.append(own)
    return {i: slot for i, slot in found[0].items() if all(i in own for own in found)}


def _place(region: Region, places: Mapping[int, Slot]) -> Region:
    graph = copied(region.graph_module.graph)
    results = list(graph.output_node().args[0])  # type: ignore[arg-type]
    last_placeholder = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    for index, slot in places.items():
        gradient = results[index]
        with graph.inserting_after(last_placeholder[0]) if last_placeholder else graph.inserting_before():
            argument = graph.placeholder(f"slot_{identifier(slot.variable)}")
        last_placeholder = [argument]
        value = gradient.meta["val"]
        with value.fake_mode:
            argument.meta["val"] = torch.empty_strided(slot.shape, slot.strides, dtype=value.dtype, device=value.device)
        results[index] = _write(graph, gradient, argument)
    graph.output_node().args = (tuple(results),)
    _remove_unused(graph)
    graph.lint()
    return replace(region, graph_module=lazy_graph_module({}, graph, region.name))


def _write(graph: fx.Graph, gradient: fx.Node, slot: fx.Node) -> fx.Node:
    product = _matrix_product(gradient)
    if product is not None and slot.meta["val"].is_contiguous():
        with graph.inserting_before(product):
            into = graph.create_node(
                "call_function", kernels.mm_into, (slot, *product.args), name=f"{product.name}_into"
            )
        into.meta = {key: product.meta[key] for key in ("stack_trace", "nn_module_stack") if key in product.meta}
        return slot
    with graph.inserting_after(gradient):
        name = slot.name.replace("slot_", "write_", 1)
        written = graph.create_node("call_function", torch.ops.aten.copy_.default, (slot, gradient), name=name)
    written.meta = {**gradient.meta, "val": slot.meta["val"]}
    return written


def _matrix_product(gradient: fx.Node) -> fx.Node | None:
    """The product whose memory a gradient is, as it lies there, if nothing else uses it."""
    node = gradient
    while node.target in _VIEWS and len(node.users) == 1:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    if node.target is not torch.ops.aten.mm.default or len(node.users) != 1:
        return None
    value, product = gradient.meta["val"], node.meta["val"]
    is_same = value.shape == product.shape and value.is_contiguous() and product.is_contiguous()
    return node if is_same else None


def _remove_unused(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _writes(node):
            graph.erase_node(node)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _pass_slots(
    program: Program,
    node: fx.Node,
    indices: list[int],
    names: Mapping[fx.Node, str],
    slots: Mapping[str, tuple[int, Slot]],
) -> None:
    of_index = {part.args[1]: names[part] for part in node.users if part in names}
    body = program.regions[ops.region_of(node)].graph_module.graph
    placeholders = [argument for argument in body.nodes if argument.op == "placeholder"][len(node.args) :]
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
