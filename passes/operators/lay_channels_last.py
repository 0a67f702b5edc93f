"""Lays convolutions out channels-last."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mirrorc.ir.graph_edits import copied
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import counted
from mirrorc.passes.operators.relaid_values import DependsOnStrides, RelaidValues

aten = torch.ops.aten

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # oneDNN's


@dataclass(frozen=True)
class LayChannelsLast:
    """Copies inputs and weights of 2-D convolutions into channels-last format, for forward and backward::

        conv = aten.convolution(x, w, ...)           x_channels_last = aten.clone(x, memory_format=channels_last)
        relu = aten.relu(conv)                       w_channels_last = aten.clone(w, memory_format=channels_last)
        flat = aten.view(relu, [2, -1])        ->    conv = aten.convolution(x_channels_last, w_channels_last, ...)
                                                     relu = aten.relu(conv)
                                                     flat = aten.reshape(relu, [2, -1])

    Results stay channels-last until an operator changes the shape. Custom operators and operations of mirrorc get
    contiguous copies.

    Guarantees: every value keeps its elements. If an operator depends on strides, the program is unchanged, and a
        remark names the operator.
    Source: torch's compiler. Regions fix the strides of their arguments, so here formats are chosen before the cut.
    """

    wanted: bool = True
    name: str = field(default="lay-channels-last", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)
    changes_bits: str = field(default="in another format, convolutions and means add in another order", init=False)

    def run(self, program: Program) -> Program:
        if not any(_is_convolution(node) for graph in program.shard_graphs for node in graph.nodes):
            reason = "there is no convolution that channels-last format makes faster"
            return program.with_remarks(reason, is_kept=False)
        if not self.wanted:
            reason = "convolutions keep their memory format: wanted is not set, as it is where the backend is faster with another"
            return program.with_remarks(reason, is_kept=False)
        layouts = [_Layout(copied(graph)) for graph in program.shard_graphs]
        try:
            for layout in layouts:
                layout.run()
        except DependsOnStrides as operator_name:
            reason = f"convolutions are not laid channels-last: {operator_name} depends on how values lie in memory"
            return program.with_remarks(reason)
        first = layouts[0]
        if not first.changed:
            reason = "convolutions and what they take are in channels-last format already"
            return program.with_remarks(reason, is_kept=False)
        remark = (
            f"{counted(first.num_convolutions, 'convolution')} work in channels-last format, for which "
            f"{counted(first.num_copies, 'value')} are copied; what is made of their results lies so, too"
        )
        return program.evolve(shard_graphs=tuple(layout.graph for layout in layouts)).with_remarks(remark)


def _is_convolution(node: fx.Node) -> bool:
    if node.target is not aten.convolution.default:
        return False
    values = [operand.meta["val"] for operand in node.args[:2]]  # type: ignore[union-attr]
    return all(value.dim() == 4 and value.dtype in _DTYPES for value in values)


class _Layout(RelaidValues):
    def __init__(self, graph: fx.Graph) -> None:
        super().__init__(graph)
        self.num_convolutions = sum(map(_is_convolution, graph.nodes))
        self._laid: dict[fx.Node, fx.Node] = {}  # for values, their copies in channels-last format

    def change(self, node: fx.Node) -> None:
        if _is_convolution(node):
            node.args = (*(self._channels_last(node, operand) for operand in node.args[:2]), *node.args[2:])
        elif node.target is aten.convolution_backward.default:
            operands: list[Any] = [self._laid.get(operand, operand) for operand in node.args[1:3]]  # type: ignore[arg-type]
            node.args = (node.args[0], *operands, *node.args[3:])

    def _channels_last(self, convolution: fx.Node, value: Any) -> fx.Node:
        if value.meta["val"].is_contiguous(memory_format=torch.channels_last):
            return value
        if value not in self._laid:
            self._laid[value] = self.copy(convolution, value, torch.channels_last)
        return self._laid[value]
