"""Splits the mirrored graph by devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from mirrorc.ir import ops
from mirrorc.ir.names import of_all_replicas
from mirrorc.ir.nodes import calls_to, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import counted
from mirrorc.torch_internals import add_node, lazy_graph_module


@dataclass(frozen=True)
class LowerDevices:
    """Gives each device a graph: the nodes of its replica, and all collectives with its own operands::

        x      = argument(name=x, replica=0)                          x = placeholder
        fwd_0  = call_region(x, ..., region=fwd_0, replica=0)         fwd_0 = call_module fwd_0(x, ...)
        ar     = all_reduce(pack, pack_1, bucket=0, ...)        ->    ar    = all_reduce(pack, bucket=0, ...)
        wait   = wait(ar, bucket=0, replica=0)                        wait  = wait(ar, bucket=0)
        output {losses: (loss, loss_1)}                               output loss

    A device without examples has no arguments; its loss is None.

    Guarantees: all graphs have the collectives in the order of the mirrored graph, and share region modules.
    """

    name: str = field(default="lower-devices", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.LOWERED, init=False)

    def run(self, program: Program) -> Program:
        graphs = [fx.Graph() for _ in program.devices]
        values: list[dict[fx.Node, fx.Node]] = [{} for _ in program.devices]
        for node in program.mirrored_graph.nodes:
            if node.op == "output":
                continue
            replica = replica_of(node)
            for r in range(program.num_replicas) if replica is None else (replica,):
                values[r][node] = _lower(graphs[r], node, values[r], r)
        output: Any = program.mirrored_graph.output_node().args[0]
        modules: dict[str, fx.GraphModule] = {}
        for r, device in enumerate(program.devices):
            loss = output["losses"][r]
            graphs[r].output(values[r][loss] if loss is not None else None)
            root = nn.Module()
            for node in graphs[r].nodes:
                if node.op == "call_module":
                    root.add_module(node.target, program.regions[node.target].graph_module)
            modules[device.name] = lazy_graph_module(root, graphs[r], f"Replica{r}")
        lowered = program.evolve(stage=Stage.LOWERED, graph=None, device_graphs=modules)
        return lowered.with_remarks(_remark(program, graphs), is_kept=False)


def _remark(program: Program, graphs: Sequence[fx.Graph]) -> str:
    sizes = sorted({len(graph.nodes) for graph in graphs})
    nodes = f"{sizes[0]} nodes" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} nodes"
    num_joint = sum(1 for _ in calls_to(program.mirrored_graph, *ops.COLLECTIVES))
    joint = f"; {counted(num_joint, 'collective')} in the same order on all" if len(graphs) > 1 else ""
    return f"{counted(len(graphs), 'graph')}, one per device, of {nodes}{joint}"


def _lower(graph: fx.Graph, node: fx.Node, values: dict[fx.Node, fx.Node], replica: int) -> fx.Node:
    kwargs = {key: value for key, value in node.kwargs.items() if key != "replica"}
    name = of_all_replicas(node.name, replica)
    if node.target is ops.argument:
        lowered = graph.placeholder(str(kwargs["name"]))
    elif node.target is ops.call_region:
        args = fx.node.map_arg(node.args, values.__getitem__)
        named = {"gradients": kwargs["gradients"]}
        lowered = add_node(graph, "call_module", str(kwargs["region"]), args, named, name)
    elif node.target in ops.COLLECTIVES:
        operands = tuple(values[n] for n in node.all_input_nodes if replica_of(n) == replica)
        lowered = add_node(graph, "call_function", node.target, operands, kwargs, name)
    else:
        args = fx.node.map_arg(node.args, values.__getitem__)
        named = fx.node.map_arg(kwargs, values.__getitem__)
        lowered = add_node(graph, "call_function", node.target, args, named, name)
    lowered.meta.update(node.meta)
    return lowered
