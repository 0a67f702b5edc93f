"""Cuts a captured program at its outputs: into a program of forward and one of backward."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.aliases import origins, shared_by
from mirrorc.analysis.graph.cuts import first_of_backward, source_of_part
from mirrorc.capture.diagnostics.capture_errors import EVEN_BATCHES
from mirrorc.custom_ops.eager_calls import take_gradient
from mirrorc.custom_ops.output_tangents import output_tangent
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import call, copy_node
from mirrorc.ir.names import identifier, unlike
from mirrorc.ir.nodes import calls_to, is_compute
from mirrorc.ir.program import Accumulation, Argument, ArgumentKind, Program, gradient_output, placeholders_of
from mirrorc.ir.type_inference import reinfer_type
from mirrorc.ir.variables import Synchronization, Variable
from mirrorc.messages.problem import problem


@dataclass(frozen=True)
class ForwardAndBackward:
    forward: Program
    backward: Program
    tangents: tuple[str, ...]  # outputs whose gradients are arguments of backward, after the tensors of the batch
    num_saved: int  # values, which are arguments of backward after the tangents
    gradients_of_leaves: Mapping[int, str]  # backward's output, by tensor of the batch
    reached: Mapping[str, frozenset[int]]  # by parameter or output of backward, tangents on which its gradient depends
    read_variables: frozenset[str]  # that backward reads again
    read_leaves: frozenset[int]  # tensors of the batch that backward reads again


def cut_at_outputs(program: Program, num_leaves: int, model_name: str) -> ForwardAndBackward:
    """Cuts a CAPTURED program whose backward begins with `output_tangent`, for a batch of ``num_leaves`` tensors.

    Forward saves the values that backward needs. Backward reads parameters and the batch again, and recomputes views
    and values without inputs.
    """
    cuts = [_Cut(program, graph) for graph in program.shard_graphs]
    first = cuts[0]
    if any(cut.types != first.types for cut in cuts):
        raise problem(
            CaptureError,
            f"MC2504: backward of {model_name} needs other values of forward for a shard of another size",
            "its graph depends on the batch size",
            EVEN_BATCHES,
        )
    names = {argument.name for argument in program.arguments}

    def free(wanted: str) -> str:
        name = unlike(names, identifier(wanted))
        names.add(name)
        return name

    tangents = [
        Argument(free(f"d({name})"), ArgumentKind.TANGENT, num_leaves + i, first.ways[name] == "concatenated")
        for i, name in enumerate(first.tangents)
    ]
    begin = num_leaves + len(tangents)
    kept = [Argument(free(node.name), ArgumentKind.SAVED, begin + i) for i, node in enumerate(first.saved)]
    backward_graphs = tuple(cut.backward(tangents, kept) for cut in cuts)
    forward_graphs = tuple(cut.forward() for cut in cuts)
    arguments = [a for a in program.arguments if first.is_weighted or a.kind is not ArgumentKind.LOSS_WEIGHT]
    seeds = {a.name for a in arguments if a.kind is ArgumentKind.SEED}
    nodes = [n for graph in backward_graphs for n in graph.find_nodes(op="placeholder") if n.target in seeds]
    if not any(node.users for node in nodes):
        arguments = [argument for argument in arguments if argument.kind is not ArgumentKind.SEED]
        for node in nodes:
            node.graph.erase_node(node)
    forward = program.evolve(
        shard_graphs=forward_graphs,
        arguments=tuple(a for a in program.arguments if a.kind is not ArgumentKind.LOSS_WEIGHT),
        variables=_variables(program.variables, forward_graphs, updates=False),
        accumulation=Accumulation.FORWARD,
    )
    backward = program.evolve(
        shard_graphs=backward_graphs,
        arguments=(*arguments, *tangents, *kept),
        variables=_variables(program.variables, backward_graphs, updates=True),
        accumulation=Accumulation.GRADIENTS if first.is_weighted else Accumulation.NONE,
    )
    of_batch = {a.name: a.leaf for a in program.arguments if a.kind is ArgumentKind.BATCH and a.leaf is not None}
    placeholders = [n for graph in backward_graphs for n in graph.find_nodes(op="placeholder") if n.users]
    leaves = frozenset(leaf for node in placeholders if (leaf := of_batch.get(str(node.target))) is not None)
    read = frozenset(str(n.kwargs["variable"]) for graph in backward_graphs for n in calls_to(graph, ops.read))
    of_backward = {str(node.kwargs["output"]) for node in calls_to(backward_graphs[0], ops.gather)}
    of_leaves = {
        leaf: name for argument, leaf in of_batch.items() if (name := gradient_output(argument)) in of_backward
    }
    return ForwardAndBackward(
        forward, backward, first.tangents, len(first.saved), of_leaves, first.reached(), read, leaves
    )


def _variables(variables: Mapping[str, Variable], graphs: Iterable[fx.Graph], *, updates: bool) -> dict[str, Variable]:
    """Variables that a program reads or writes; with ``updates`` also those of forward, which workers average."""
    used: set[str] = set()
    for graph in graphs:
        output: Any = graph.output_node().args[0]
        used |= {str(node.kwargs["variable"]) for node in calls_to(graph, ops.read)}
        used |= {*output["gradients"], *output["writes"]}
    if updates:
        used |= {name for name, v in variables.items() if v.synchronization is Synchronization.PER_REPLICA}
    return {name: v if updates else replace(v, update=None) for name, v in variables.items() if name in used}


class _Cut:
    """The cut of a graph. ``ways`` say how each output is gathered."""

    def __init__(self, program: Program, graph: fx.Graph) -> None:
        self._graph, self._program = graph, program
        output: Any = graph.output_node().args[0]
        self.output: dict[str, Any] = output
        order = {node: i for i, node in enumerate(graph.nodes)}
        first = first_of_backward(program, graph)
        assert first is not None, "the outputs have tangents"
        tangents = [node for node in graph.nodes if node.target is output_tangent]
        weights = placeholders_of(graph, program.arguments, ArgumentKind.LOSS_WEIGHT)
        behind: set[fx.Node] = {*tangents, *weights}
        for node in graph.nodes:
            if not behind.isdisjoint(node.all_input_nodes):
                behind.add(node)
        gathers = list(calls_to(graph, ops.gather))
        results = [*self.output["gradients"].values(), *(node for node in gathers if node in behind)]
        is_late = {node for node in graph.nodes if order[node] >= order[first] and node.op != "output"} | behind
        self._backward = _needed(results, is_late)
        self._forward = [
            node for node in graph.nodes if node not in is_late and node.op not in ("placeholder", "output")
        ]
        self.ways = {str(node.kwargs["output"]): str(node.kwargs["how"]) for node in gathers}
        self._tangents = {str(node.args[1]): node for node in tangents if node in self._backward}
        self.tangents = tuple(self._tangents)
        self.saved = self._values_to_save()

    @property
    def is_weighted(self) -> bool:
        """Whether backward takes the worker's weight: its gradients, or values in it, are summed over workers."""
        meets = any(node.target in ops.MEETINGS for node in self._backward)
        return bool(self.output["gradients"]) or (meets and self._program.workers.are_several)

    @property
    def types(self) -> tuple[Any, ...]:
        return self.tangents, [(node.meta["val"].dtype, node.meta["val"].dim()) for node in self.saved]

    def reached(self) -> dict[str, frozenset[int]]:
        tangents = {node: frozenset((place,)) for place, node in enumerate(self._tangents.values())}
        depends: dict[fx.Node, frozenset[int]] = {}
        for node in self._graph.nodes:
            depends[node] = tangents.get(node) or frozenset().union(*map(depends.__getitem__, node.all_input_nodes))
        outputs = {str(node.kwargs["output"]): depends[node] for node in calls_to(self._graph, ops.gather)}
        return outputs | {name: depends[node] for name, node in self.output["gradients"].items()}

    def _values_to_save(self) -> list[fx.Node]:
        """Also inserts recomputed values into backward, before their first use."""
        late = set(self._backward)
        inside, saved = set(late), dict[fx.Node, None]()
        computed = [node for node in self._backward if node.target is not output_tangent]
        waiting = [source for node in computed for source in node.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in inside or node in saved or node.op == "placeholder":
                continue
            if self._is_made_again(node):
                inside.add(node)
                waiting += node.all_input_nodes
            else:
                saved[node] = None
        order = {node: i for i, node in enumerate(self._graph.nodes)}
        first_use: dict[fx.Node, int] = {}
        for node in reversed(self._graph.nodes):
            if node in inside:
                first_use[node] = (
                    order[node] if node in late else min(first_use[user] for user in node.users if user in inside)
                )
        self._backward = sorted(inside, key=lambda node: (first_use[node], order[node]))
        return [node for node in self._graph.nodes if node in saved]

    def _is_made_again(self, node: fx.Node) -> bool:
        if node.target is ops.read:
            return node.kwargs["variable"] not in self.output["writes"]
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return True
        if is_compute(source_of_part(node)) and shared_by(node):
            return True
        return node.target is not operator.getitem and not any(
            isinstance(source.meta.get("val"), torch.Tensor) for source in node.all_input_nodes
        )

    def forward(self) -> fx.Graph:
        graph, values = self._begun(ArgumentKind.LOSS_WEIGHT)
        for node in self._forward:
            values[node] = copy_node(graph, node, values)
        for number, node in enumerate(self.saved):
            value = values[node]
            if any(owner.op == "placeholder" or owner.target is ops.read for owner in origins(node)):
                # it may be written before backward, by the step or by the caller
                value = call(graph, torch.ops.aten.clone.default, (value,))
                value.meta.update(node.meta)
            call(graph, ops.keep, (value,), {"number": number}).meta["val"] = None
        writes = {name: values[node] for name, node in self.output["writes"].items()}
        graph.output({"loss": None, "gradients": {}, "writes": writes})
        return graph

    def backward(self, tangents: Sequence[Argument], saved: Sequence[Argument]) -> fx.Graph:
        graph, values = self._begun()
        weight = placeholders_of(self._graph, self._program.arguments, ArgumentKind.LOSS_WEIGHT)[0]
        for argument, node in zip(tangents, self._tangents.values(), strict=True):
            values[node] = _placeholder(graph, argument, node)
        for argument, node in zip(saved, self.saved, strict=True):
            values[node] = _placeholder(graph, argument, node)
        if not self.is_weighted:
            one = call(graph, torch.ops.aten.full.default, ([], 1.0), {"dtype": weight.meta["val"].dtype})
            one.meta.update(weight.meta)
            values[weight].replace_all_uses_with(one)
            graph.erase_node(values[weight])
            values[weight] = one
        is_divided = self._program.workers.are_several and self.is_weighted
        for node in self._backward:
            if node not in values:
                values[node] = copy_node(graph, node, values)
            if node.target is take_gradient and not self.is_weighted:
                values[node].update_arg(2, None)  # the weight is one
            if node.target is ops.gather and is_divided:
                _divide(values[node], values[weight])
        gradients = {name: values[node] for name, node in self.output["gradients"].items()}
        if not self.is_weighted and not values[weight].users:
            graph.erase_node(values[weight])
        graph.output({"loss": None, "gradients": gradients, "writes": {}})
        return graph

    def _begun(self, *without: ArgumentKind) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        graph, values = fx.Graph(), {}
        left_out = {argument.name for argument in self._program.arguments if argument.kind in without}
        for node in self._graph.find_nodes(op="placeholder"):
            if node.target not in left_out:
                values[node] = copy_node(graph, node, {})
        return graph, values


def _needed(results: Sequence[fx.Node], among: Set[fx.Node]) -> list[fx.Node]:
    needed: set[fx.Node] = set()
    waiting = [node for node in results if node in among]
    while waiting:
        node = waiting.pop()
        if node not in needed and node.op != "placeholder":
            needed.add(node)
            if node.target is not output_tangent:
                waiting += [source for source in node.all_input_nodes if source in among]
    return list(needed)


def _divide(gather: fx.Node, weight: fx.Node) -> None:
    """Divides an argument's gradient by the worker's weight, because the argument belongs to one worker's loss."""
    (gradient,) = gather.all_input_nodes
    with gather.graph.inserting_before(gather):
        quotient = call(gather.graph, torch.ops.aten.div.Tensor, (gradient, weight))
    quotient.meta.update(gradient.meta)
    reinfer_type(quotient)  # a gradient may be expanded
    gather.replace_input_with(gradient, quotient)


def _placeholder(graph: fx.Graph, argument: Argument, like: fx.Node) -> fx.Node:
    node = graph.placeholder(argument.name)
    node.meta["val"] = like.meta["val"]
    return node
