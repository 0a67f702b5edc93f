"""Replaces the tanh in GELU by a sigmoid."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from mirrorc.analysis.graph.decompositions import DECOMPOSITIONS, is_tanh_gelu, tensors_of
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import counted
from mirrorc.torch_internals import add_node, bare_name, traced_on_fake_tensors


@dataclass(frozen=True)
class DecomposeGelu:
    """Writes GELU's tanh approximation, and its gradient, with a sigmoid::

        gelu = aten.gelu(x, approximate=tanh)    ->    gelu_mul     = aten.mul(x, x)
                                                       ...
                                                       gelu_sigmoid = aten.sigmoid(gelu_mul_3)
                                                       gelu_mul_4   = aten.mul(x, gelu_sigmoid)

    ``0.5 x (1 + tanh(u))`` is ``x sigmoid(2 u)``. On CPUs Inductor's tanh takes six times as long as the exp in its
    sigmoid.

    Guarantees: values change by rounding only; the verifier knows the formula (`mirrorc.analysis.graph.decompositions`).
    """

    wanted: bool = True
    name: str = field(default="decompose-gelu", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)
    changes_bits: str = field(
        default="a sigmoid is rounded otherwise than the tanh of which it takes the place", init=False
    )

    def run(self, program: Program) -> Program:
        if not any(is_tanh_gelu(node) for graph in program.shard_graphs for node in graph.nodes):
            return program.with_remarks("there is no GELU by tanh", is_kept=False)
        if not self.wanted:
            reason = "GELU keeps its tanh: wanted is not set, as it is where the backend is faster without"
            return program.with_remarks(reason, is_kept=False)
        graphs = tuple(copied(graph) for graph in program.shard_graphs)
        nodes = [node for graph in graphs for node in graph.nodes if is_tanh_gelu(node)]
        for node in nodes:
            _decompose(node)
        remark = f"a sigmoid takes the place of the tanh in {counted(len(nodes) // len(graphs), 'GELU operator')}"
        return program.evolve(shard_graphs=graphs).with_remarks(remark)


def _decompose(node: fx.Node) -> None:
    operands = tensors_of(node)
    body = traced_on_fake_tensors(DECOMPOSITIONS[node.target], [source.meta["val"] for source in operands])
    placeholders = [inside for inside in body.nodes if inside.op == "placeholder"]
    values: dict[fx.Node, fx.Node] = dict(zip(placeholders, operands, strict=True))
    with node.graph.inserting_before(node):
        for inside in body.nodes:
            if inside.op == "call_function":
                args, kwargs = (fx.node.map_arg(part, values.__getitem__) for part in (inside.args, inside.kwargs))
                name = f"{node.name}_{bare_name(inside.target)}"
                values[inside] = add_node(node.graph, inside.op, inside.target, args, kwargs, name)
                values[inside].meta.update({**node.meta, "val": inside.meta["val"]})
    made = body.output_node().args[0]
    assert isinstance(made, fx.Node)
    node.replace_all_uses_with(values[made])
    node.graph.erase_node(node)
