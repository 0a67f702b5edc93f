"""Recomputes checkpointed values in backward."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch import fx

from mirrorc.analysis.graph.cuts import first_of_backward
from mirrorc.analysis.memory.recomputed_values import needed_again, num_bytes_of, recomputed_values, saved_values
from mirrorc.ir.graph_edits import copied, copy_node, remove_unused
from mirrorc.ir.nodes import CHECKPOINT, checkpoint_of
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import counted
from mirrorc.printing.printed_values import size_text


@dataclass(frozen=True)
class RecomputeCheckpoints:
    """Copies the operators of a `torch.utils.checkpoint` to backward, before their first use::

        mm    = aten.mm(x, w)              # checkpoint      mm         = aten.mm(x, w)
        relu  = aten.relu(mm)              # checkpoint      relu       = aten.relu(mm)
        ...                                            ->    ...
        grad  = aten.mm(t, relu)           # backward        mm_again   = aten.mm(x, w)
                                                             relu_again = aten.relu(mm_again)
                                                             grad       = aten.mm(t, relu_again)

    Forward still saves a checkpoint's inputs and outputs, values that its policy saves, and the operands of the first
    backward operator. Random operators are functions of a seed, so their copies draw the same numbers.

    Guarantees: every value is the same expression, bit for bit; no checkpoint remains.
    """

    name: str = field(default="recompute-checkpoints", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)

    def run(self, program: Program) -> Program:
        if not any(CHECKPOINT in node.meta for graph in program.shard_graphs for node in graph.nodes):
            return program.with_remarks("the model has no checkpoints", is_kept=False)
        graphs = tuple(copied(graph) for graph in program.shard_graphs)
        remarks = [_recompute(program, graph) for graph in graphs]
        return program.evolve(shard_graphs=graphs).with_remarks(remarks[0])


def _recompute(program: Program, graph: fx.Graph) -> str:
    numbers = {checkpoint.number for node in graph.nodes if (checkpoint := checkpoint_of(node)) is not None}
    checkpoints = counted(len(numbers), "checkpoint")
    first = first_of_backward(program, graph)
    if first is None:
        _forget_checkpoints(graph)
        return f"{checkpoints} without effect: nothing is kept for a backward"
    nodes = list(graph.nodes)
    backward = dict.fromkeys(nodes[nodes.index(first) :])
    before = _saved_bytes(nodes, backward)
    place = {node: i for i, node in enumerate(nodes) if node not in backward}
    again = recomputed_values(place, backward, first, checkpoint_of)
    copies: dict[fx.Node, fx.Node] = {}
    for user in backward:
        needed = needed_again(user, again, copies) if user.op != "output" else set()
        with graph.inserting_before(user):
            for node in sorted(needed - copies.keys(), key=place.__getitem__):
                operands = {source: copies.get(source, source) for source in node.all_input_nodes}
                copies[node] = copy_node(graph, node, operands, name=f"{node.name}_again")
        for source in needed.intersection(user.all_input_nodes):
            user.replace_input_with(source, copies[source])
    remove_unused(graph)
    _forget_checkpoints(graph)
    after = _saved_bytes(list(graph.nodes), {**backward, **dict.fromkeys(copies.values())})
    num_run = sum(node.target is not operator.getitem for node in copies)
    return (
        f"{checkpoints}: backward runs {counted(num_run, 'operator')} of forward again, for which forward keeps "
        f"{size_text(after)}, not {size_text(before)}"
    )


def _forget_checkpoints(graph: fx.Graph) -> None:
    for node in graph.nodes:
        node.meta.pop(CHECKPOINT, None)


def _saved_bytes(nodes: list[fx.Node], backward: dict[fx.Node, None]) -> int:
    return sum(map(num_bytes_of, saved_values(nodes, backward)))
