"""Takes the tanh out of GELU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from mirrorc.ir.graph_edits import copied
from mirrorc.ir.program import Program, Stage
from mirrorc.printing.wording import counted
from mirrorc.torch_internals import add_node, traced_on_fake_tensors

aten = torch.ops.aten

_SCALE = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


@dataclass(frozen=True)
class DecomposeGelu:
    """Writes GELU's tanh approximation as a product with a sigmoid, forward and backward::

        gelu = aten.gelu(x, approximate=tanh)    ->    gelu_mul     = aten.mul(x, x)
                                                       ...
                                                       gelu_sigmoid = aten.sigmoid(gelu_mul_3)
                                                       gelu_mul_4   = aten.mul(x, gelu_sigmoid)

    ``0.5 x (1 + tanh(u))`` is ``x sigmoid(2 u)``. On CPUs Inductor's tanh takes six times as long as its exp, of which its
    sigmoid is made. GELU by the error function stays as it is.

    Needs: a captured graph in which GELU is an operator.
    Guarantees: every value is the same number but for rounding; where the tanh is close to -1 it is closer to the exact one, as
        nothing cancels.

    Attributes:
        wanted: whether the code that will run is faster so; otherwise the pass leaves the program as it is.
    """

    wanted: bool = True
    name: str = field(default="decompose-gelu", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)
    changes_dataflow: bool = field(default=True, init=False)
    changes_bits: str = field(
        default="a sigmoid is rounded otherwise than the tanh of which it takes the place", init=False
    )

    def run(self, program: Program) -> Program:
        if not any(_is_tanh_gelu(node) for graph in program.shard_graphs for node in graph.nodes):
            return program.with_remarks("there is no GELU by tanh", is_kept=False)
        if not self.wanted:
            reason = "GELU keeps its tanh: this backend has an operator of its own for it"
            return program.with_remarks(reason, is_kept=False)
        graphs = tuple(copied(graph) for graph in program.shard_graphs)
        nodes = [node for graph in graphs for node in graph.nodes if _is_tanh_gelu(node)]
        for node in nodes:
            _decompose(node)
        said = f"a sigmoid takes the place of the tanh in {counted(len(nodes) // len(graphs), 'GELU operator')}"
        return program.evolve(shard_graphs=graphs).with_remarks(said)


def _is_tanh_gelu(node: fx.Node) -> bool:
    return node.target in _DECOMPOSITIONS and node.kwargs.get("approximate") == "tanh"


def _decompose(node: fx.Node) -> None:
    """Puts the operators that make up a GELU in its place; the last of them keeps its name in front of its own."""
    given = node.all_input_nodes
    body = traced_on_fake_tensors(_DECOMPOSITIONS[node.target], [source.meta["val"] for source in given])
    placeholders = [inside for inside in body.nodes if inside.op == "placeholder"]
    values: dict[fx.Node, fx.Node] = dict(zip(placeholders, given, strict=True))
    with node.graph.inserting_before(node):
        for inside in body.nodes:
            if inside.op == "call_function":
                args, kwargs = (fx.node.map_arg(part, values.__getitem__) for part in (inside.args, inside.kwargs))
                operator = inside.target._schema.name.split("::")[-1].strip("_")
                name = f"{node.name}_{operator}"
                values[inside] = add_node(node.graph, inside.op, inside.target, args, kwargs, name)
                values[inside].meta.update({**node.meta, "val": inside.meta["val"]})
    made = body.output_node().args[0]
    assert isinstance(made, fx.Node)
    node.replace_all_uses_with(values[made])
    node.graph.erase_node(node)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """``aten.gelu(x, approximate="tanh")`` without tanh; computed in float32 for 16-bit numbers, as torch does."""
    exact = _exact(x)
    return _cast(exact * torch.sigmoid(2 * _SCALE * _argument(exact)), x.dtype)


def gelu_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``aten.gelu_backward(gradient, x, approximate="tanh")`` without tanh, likewise."""
    exact = _exact(x)
    share = torch.sigmoid(2 * _SCALE * _argument(exact))
    slope = 2 * _SCALE * (1 + 3 * _CUBIC * (exact * exact))
    rest = -share + 1  # not 1 - share, an operator that Inductor wants decomposed
    return _cast(_exact(gradient) * (share + exact * (share * rest) * slope), x.dtype)


_DECOMPOSITIONS: Mapping[Any, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        aten.gelu.default: gelu,
        aten.gelu_backward.default: gelu_backward,
    }
)


def _argument(x: torch.Tensor) -> torch.Tensor:
    return x + _CUBIC * (x * x * x)


def _exact(x: torch.Tensor) -> torch.Tensor:
    return _cast(x, torch.float32) if x.dtype.itemsize < 4 else x


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By the operator that both backends run as it is."""
    return torch.ops.prims.convert_element_type(x, dtype) if x.dtype is not dtype else x
