"""Pads rows of products to multiples of 16 bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.padded_products import FACTORS, places_of_columns
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.rearrangements import REARRANGEMENTS
from mirrorc.ir.type_inference import reinfer_type
from mirrorc.messages.wording import counted
from mirrorc.passes.operators.relaid_values import DependsOnStrides, RelaidValues
from mirrorc.torch_internals import add_node

aten = torch.ops.aten

_ROW_BYTES = 16  # kernels for GPUs' matrix units need rows of a multiple of these
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PadProducts:
    """Pads the second matrix of a large product, so that rows have a multiple of 16 bytes::

        logits = aten.mm(x, w)               w_padded = aten.constant_pad_nd(w, [0, 3])
        loss   = f(logits)            ->     logits_padded = aten.mm(x, w_padded)
                                             logits = aten.slice(logits_padded, 1, 0, 50257)
                                             loss   = f(logits)

    The product becomes a view with larger row strides, and elementwise results keep these strides. Outputs of the
    graph, such as gradients of weights, are not padded.

    Guarantees: as `LayChannelsLast`.
    Source: torch's compiler on GPUs.

    Attributes:
        fewest_rows: pad only if the first matrix has so many rows; they pay for the copy of the second.
        fewest_elements: smaller products are not padded.
    """

    fewest_rows: int = 1024
    fewest_elements: int = 2**22
    name: str = field(default="pad-products", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)
    changes_bits: str = field(default="the kernels of padded products add in another order", init=False)

    def run(self, program: Program) -> Program:
        padded = [_PaddedValues(copied(graph), self) for graph in program.shard_graphs]
        try:
            for relaid in padded:
                relaid.run()
        except DependsOnStrides as operator_name:
            return program.with_remarks(f"products are not padded: {operator_name} depends on how values lie in memory")
        num_products = padded[0].num_products
        if not any(relaid.num_products for relaid in padded):
            reason = "there is no large product with an odd number of columns"
            return program.with_remarks(reason, is_kept=False)
        products = counted(num_products, "product")
        remark = f"{products} with an odd number of columns are parts of larger ones, whose rows are padded"
        return program.evolve(shard_graphs=tuple(relaid.graph for relaid in padded)).with_remarks(remark)


def _is_result(node: fx.Node) -> bool:
    """Looks through transpositions, because gradients of weights are transposed before they are returned."""
    users = node.users
    return any(user.op == "output" or (user.target in REARRANGEMENTS and _is_result(user)) for user in users)


class _PaddedValues(RelaidValues):
    def __init__(self, graph: fx.Graph, bounds: PadProducts) -> None:
        super().__init__(graph)
        self.num_products = 0
        self._bounds = bounds

    def change(self, node: fx.Node) -> None:
        if node.target not in FACTORS or node.kwargs or _is_result(node):
            return
        x, weight = (node.args[place] for place in FACTORS[node.target])
        missing = self._missing(x.meta["val"], weight.meta["val"])  # type: ignore[union-attr]
        if not missing:
            return
        num_columns = weight.meta["val"].shape[1]  # type: ignore[union-attr]
        operands = list(node.args)
        for place in places_of_columns(node):
            padding = (operands[place], [0, missing])
            operands[place] = self._made(node, aten.constant_pad_nd.default, padding, f"{operands[place]}_padded")
        product = self._made(node, node.target, tuple(operands), f"{node.name}_padded")
        node.target, node.args = aten.slice.Tensor, (product, 1, 0, num_columns)
        self.changed.add(node)
        self.num_products += 1

    def _missing(self, x: torch.Tensor, weight: torch.Tensor) -> int:
        sizes = (*x.shape, *weight.shape)
        if x.dtype not in _DTYPES or weight.dtype is not x.dtype or not all(isinstance(size, int) for size in sizes):
            return 0
        num_rows, num_columns = x.shape[0], weight.shape[1]
        if num_rows < self._bounds.fewest_rows or num_rows * num_columns < self._bounds.fewest_elements:
            return 0
        return -num_columns % (_ROW_BYTES // x.dtype.itemsize)

    def _made(self, user: fx.Node, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        with self.graph.inserting_before(user):
            made = add_node(self.graph, "call_function", target, args, {}, name)
        made.meta.update({key: user.meta[key] for key in user.meta if key != "val"})
        reinfer_type(made)
        return made
