"""Reuses memory of large results in each step."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import fx

from mirrorc.analysis.gradients.region_gradients import calls_by_region
from mirrorc.analysis.graph.dying_arguments import last_reader, unaliased_product
from mirrorc.custom_ops import out_products
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import call, copied, insert_write
from mirrorc.ir.nodes import region_calls, region_of
from mirrorc.ir.program import Program, Region, Stage
from mirrorc.messages.wording import counted
from mirrorc.printing.printed_values import size_text
from mirrorc.torch_internals import has_symbols, lazy_graph_module

_INTO = MappingProxyType(
    {torch.ops.aten.mm.default: out_products.mm_into, torch.ops.aten.addmm.default: out_products.linear_into}
)


@dataclass(frozen=True)
class ReserveMemory:
    """Lets regions compute large products into memory that is reused in each step::

        fwd_0 = call_region(x, w, region=fwd_0)           reserved_0 = reserved(number=0, shape=[1024, 16000], dtype=float32)
        a     = fwd_0[0]                           ->     fwd_0 = call_region(x, w, reserved_0, region=fwd_0)
                                                          a     = fwd_0[0]                # is the reserved memory

        region fwd_0(x, w):                               region fwd_0(x, w, reserved_mm):
            mm = aten.mm(x, w)                     ->         mirrorc.mm_into(reserved_mm, x, w)
            return [mm]                                       return [reserved_mm]

    The C library returns freed blocks of this size to the system, and new ones are cleared at the first write. For
    logits over 16,000 words, this takes a twentieth of the step. Results with disjoint lifetimes share memory.

    Needs: regions in their final form.
    Guarantees: no reader of a product in reserved memory returns a view of it, so the memory is free after the last
        read (rule reserved_values_do_not_overlap).

    Attributes:
        wanted: True if the C library allocates the devices' memory; GPU allocators keep freed memory.
        min_bytes: smaller results get new memory; glibc itself can keep blocks below 32 MiB.
    """

    wanted: bool = True
    min_bytes: int = 2**25
    name: str = field(default="reserve-memory", init=False)
    input_stage: Stage = field(default=Stage.OUTLINED, init=False)
    output_stage: Stage = field(default=Stage.OUTLINED, init=False)
    trains_only: ClassVar = True

    def run(self, program: Program) -> Program:
        if not self.wanted:
            return program.with_remarks(
                "no memory is reserved: wanted is not set, as it is on GPUs, whose allocator keeps memory",
                is_kept=False,
            )
        graphs = tuple(copied(graph) for graph in program.shard_graphs)
        regions, places_of = dict(program.regions), {}
        for name, calls in calls_by_region(graphs).items():
            body = program.regions[name].graph_module.graph
            places_of_calls = [set(self._places(program, body, node)) for node in calls]
            if places := sorted(set.intersection(*places_of_calls)):
                places_of[name] = places
                regions[name] = _reserving(program.regions[name], places)
        reserved = [list(_reserve(graph, regions, places_of)) for graph in graphs]
        if not any(reserved):
            return program.with_remarks("no result of a region is large enough to reserve memory for it", is_kept=False)
        largest = max(_num_bytes(node) for nodes in reserved for node in nodes)
        results = counted(max(map(len, reserved)), "result")
        remark = f"{results} of regions in reserved memory, the largest of {size_text(largest)}"
        return program.evolve(shard_graphs=graphs, regions=regions).with_remarks(remark)

    def _places(self, program: Program, body: fx.Graph, node: fx.Node) -> Iterator[int]:
        for part in node.users:
            place: Any = part.args[1]
            product = unaliased_product(body, place) if part.target is operator.getitem else None
            if (
                product is None
                or product.target not in _INTO
                or product.kwargs
                or not _is_large(product, self.min_bytes)
            ):
                continue
            is_used_up = last_reader(part, program.regions) is not None
            if is_used_up and sum(other.args[1] == place for other in node.users) == 1:
                yield place


def _is_large(product: fx.Node, min_bytes: int) -> bool:
    value = product.meta["val"]
    return not has_symbols(value) and value.is_contiguous() and _num_bytes(product) >= min_bytes


def _num_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.itemsize)


def _reserving(region: Region, places: list[int]) -> Region:
    graph = copied(region.graph_module.graph)
    for place in places:
        product: Any = unaliased_product(graph, place)
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            argument = graph.placeholder(f"reserved_{product.name}")
        argument.meta["val"] = product.meta["val"]
        insert_write(product, _INTO[product.target], (argument, *product.args), product)
        product.replace_all_uses_with(argument)
        graph.erase_node(product)
    graph.lint()
    return replace(region, graph_module=lazy_graph_module({}, graph, region.name))


def _reserve(graph: fx.Graph, regions: Mapping[str, Region], places_of: Mapping[str, list[int]]) -> Iterator[fx.Node]:
    busy_until: list[fx.Node] = []  # for each number, the last reader of its present value
    for node in region_calls(graph):
        places = places_of.get(region_of(node), [])
        arguments = regions[region_of(node)].graph_module.graph.find_nodes(op="placeholder")[len(node.args) :]
        for place, argument in zip(places, arguments, strict=True):
            part = next(user for user in node.users if user.args[1] == place)
            last: Any = last_reader(part, regions)
            number = next((i for i, reader in enumerate(busy_until) if reader < node), len(busy_until))
            busy_until[number:] = [last, *busy_until[number + 1 :]]
            value = argument.meta["val"]
            details = {"number": number, "shape": tuple(value.shape), "dtype": value.dtype}
            with graph.inserting_before(node):
                reserved = call(graph, ops.reserved, (), details)
            reserved.meta["val"] = value
            node.args = (*node.args, reserved)
            yield reserved
