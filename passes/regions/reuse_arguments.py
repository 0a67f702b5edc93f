"""Lets regions write into dying arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import fx

from mirrorc.analysis.gradients.region_gradients import calls_by_region
from mirrorc.analysis.graph.aliases import origins, viewed
from mirrorc.analysis.graph.dying_arguments import dying_places, stored_product
from mirrorc.custom_ops import out_products
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import is_compute
from mirrorc.ir.program import Program, Region, Stage
from mirrorc.ir.value_types import is_same_type, value_type
from mirrorc.messages.wording import counted
from mirrorc.torch_internals import lazy_graph_module, storage_bytes_now

aten, prims = torch.ops.aten, torch.ops.prims

_ELEMENTWISE = frozenset({
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default, aten.exp.default,
    aten.sigmoid.default, aten.tanh.default, aten.where.self, aten.alias.default, aten.le.Scalar, aten.gt.Scalar,
    prims.convert_element_type.default,
})  # fmt: skip
"""Operators that may run in place: each element of the result depends on one element of each operand."""

_INTO_SLOTS = frozenset({out_products.mm_into, out_products.addmm_into, out_products.add_rows_into})


@dataclass(frozen=True)
class ReuseArguments:
    """Runs an elementwise operator in place on an argument that nothing reads afterwards::

        region bwd_0(logits, lse, dy, w):                region bwd_0(logits, lse, dy, w):
            ...                                              ...
            sub = aten.sub(dy, mul)                ->        sub   = aten.sub(dy, mul)
            mm  = aten.mm(sub, w)                            reuse = aten.copy_(logits, sub)
            return [mm]                                      mm    = aten.mm(reuse, w)
                                                             return [mm]

    New large blocks come from the system, and their allocation and clearing can take longer than the computation.

    Needs: regions in their final form.
    Guarantees: an argument is written only if nothing reads it after any call of its region (rule
        regions_write_only_their_memory).

    Attributes:
        wanted: True if the backend fuses the copy with its source.
        min_bytes: smaller results get new memory.
    """

    wanted: bool = True
    min_bytes: int = 2**20
    name: str = field(default="reuse-arguments", init=False)
    input_stage: Stage = field(default=Stage.OUTLINED, init=False)
    output_stage: Stage = field(default=Stage.OUTLINED, init=False)
    trains_only: ClassVar = True

    def run(self, program: Program) -> Program:
        if not self.wanted:
            reason = "no argument is written: wanted is not set, as it is where the backend does not fuse operators"
            return program.with_remarks(reason, is_kept=False)
        regions, num_reused = dict(program.regions), 0
        for name, calls in calls_by_region(program.shard_graphs).items():
            places = set.intersection(*(dying_places(program, call) for call in calls))
            reuses = self._reuses(program.regions[name].graph_module.graph, places)
            if reuses:
                regions[name] = _reusing(program.regions[name], reuses)
                num_reused += len(reuses)
        if not num_reused:
            return program.with_remarks("no argument that dies in a region has room for a result", is_kept=False)
        remark = f"{counted(num_reused, 'result')} of regions written into the memory of arguments that die there"
        return program.evolve(regions=regions).with_remarks(remark)

    def _reuses(self, body: fx.Graph, places: set[int]) -> dict[str, str]:
        reuses: dict[str, str] = {}
        for place, argument in enumerate(body.find_nodes(op="placeholder")):
            value = _last_made_of(argument) if place in places else None
            memory = argument.meta["val"]
            is_large = isinstance(memory, torch.Tensor) and storage_bytes_now(memory) >= self.min_bytes
            if value is not None and is_large and value.name not in reuses.values() and not _leaves(value):
                reuses[argument.name] = value.name
        return reuses


def _last_made_of(argument: fx.Node) -> fx.Node | None:
    reached, value = {argument}, argument
    order = list(argument.graph.nodes)
    for node in order[order.index(argument) + 1 :]:
        if reached.isdisjoint(node.all_input_nodes):
            continue
        if node.target not in _ELEMENTWISE:
            break
        reached.add(node)
        value = node
    is_read_elsewhere = any(user not in reached for node in reached - {value} for user in node.users)
    return value if value is not argument and not is_read_elsewhere and _fits(value, argument) else None


def _fits(value: fx.Node, argument: fx.Node) -> bool:
    is_stored = any(_reads_memory(user) for user in value.users)
    stored, target = value.meta["val"], argument.meta["val"]
    is_alike = is_same_type(value_type(stored), value_type(target))
    return is_stored and is_alike


def _reads_memory(user: fx.Node) -> bool:
    """True for a product, also behind a view or into a slot, because backends store a product's operands."""
    if stored_product(user) is user or user.target in _INTO_SLOTS:
        return True
    return is_compute(user) and viewed(user) is not None and any(_reads_memory(other) for other in user.users)


def _leaves(value: fx.Node) -> bool:
    results = value.graph.output_node().all_input_nodes
    return any(value in origins(result) for result in results)


def _reusing(region: Region, reuses: Mapping[str, str]) -> Region:
    graph = copied(region.graph_module.graph)
    nodes = {node.name: node for node in graph.nodes}
    for argument, name in reuses.items():
        value = nodes[name]
        with graph.inserting_after(value):
            written = graph.create_node(
                "call_function", aten.copy_.default, (nodes[argument], value), name=f"reuse_{argument}"
            )
        written.meta = {**value.meta, "val": nodes[argument].meta["val"]}
        value.replace_all_uses_with(written, delete_user_cb=lambda user, copy=written: user is not copy)
    graph.lint()
    return replace(region, graph_module=lazy_graph_module({}, graph, region.name))
