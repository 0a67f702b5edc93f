"""Reads single elements in place of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.one_hot_rows import ROW_READERS, ValueOp, by_elements
from mirrorc.ir.graph_edits import copied, insert, remove_unused
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import counted
from mirrorc.torch_internals import sizes_key


@dataclass(frozen=True)
class ReadRowElements:
    """Computes one element per row, in place of sums over one-hot rows and gathers from computed rows::

        rows = aten.scatter(zeros, 1, t, -1.0)
        mul  = aten.mul(rows, w)                     ->    mul   = aten.mul(rows, w)
        sum  = aten.sum(mul, [1], True)                    minus = aten.mul(w, -1.0)
                                                           sum   = aten.add(minus, 0.0)    # never negative zero

        sub  = aten.sub(logits, lse)                       found = aten.gather(logits, 1, t)
        loss = aten.gather(sub, 1, t)                ->    loss  = aten.sub(found, lse)

    Both occur in losses of classifiers.

    Guarantees: the same bits, except for sums over rows with a non-finite factor. These were NaN (0 times infinity),
        and become the row's selected element.
    """

    name: str = field(default="read-row-elements", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)

    def run(self, program: Program) -> Program:
        graphs = tuple(copied(graph) for graph in program.shard_graphs)
        num_changed = sum(_shorten(program, node) for graph in graphs for node in list(graph.nodes))
        if not num_changed:
            return program.with_remarks("no sum or read of rows can do with one element of each", is_kept=False)
        for graph in graphs:
            remove_unused(graph)
        remark = f"{counted(num_changed // len(graphs), 'sum or read', 'sums or reads')} of rows made from one element of each"
        return program.evolve(shard_graphs=graphs).with_remarks(remark)


@dataclass(frozen=True)
class _Nodes:
    """`RowValues` for FX nodes; `apply` inserts nodes before ``replaced``."""

    program: Program
    replaced: fx.Node

    def op_of(self, value: Any) -> ValueOp[fx.Node] | None:
        tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
        if not isinstance(tensor, torch.Tensor):
            return None
        return ValueOp(value.target, value.args, dict(value.kwargs), sizes_key(tensor.shape), tensor.dtype)

    def apply(self, target: Any, args: tuple[Any, ...]) -> fx.Node:
        node = insert(self.program, self.replaced, target, args)
        node.meta = {**self.replaced.meta, "val": node.meta["val"]}
        return node


def _shorten(program: Program, node: fx.Node) -> bool:
    if node.target not in ROW_READERS:
        return False
    nodes = _Nodes(program, node)
    op = nodes.op_of(node)
    shorter = by_elements(nodes, op) if op is not None else None
    if shorter is None:
        return False
    node.replace_all_uses_with(shorter)
    node.graph.erase_node(node)
    return True
