"""Lets backward compute again what forward computes within checkpoints, instead of keeping it in memory."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from mirrorc.analysis.aliases import viewed
from mirrorc.analysis.backward import first_of_backward
from mirrorc.ir import ops
from mirrorc.ir.checkpoints import CHECKPOINT, checkpoint_of
from mirrorc.ir.graph_edits import copied, copy_node, remove_unused
from mirrorc.ir.nodes import is_compute
from mirrorc.ir.program import Program, Stage
from mirrorc.printing.wording import counted
from mirrorc.torch_internals import num_bytes_now


@dataclass(frozen=True)
class RecomputeCheckpoints:
    """Copies what forward computes within a `torch.utils.checkpoint` to where backward first needs it::

        mm    = aten.mm(x, w)              # checkpoint      mm         = aten.mm(x, w)
        relu  = aten.relu(mm)              # checkpoint      relu       = aten.relu(mm)
        ...                                            ->    ...
        grad  = aten.mm(t, relu)           # backward        mm_again   = aten.mm(x, w)
                                                             relu_again = aten.relu(mm_again)
                                                             grad       = aten.mm(t, relu_again)

    Forward then keeps what the checkpoint is given, and what its policy keeps, for backward alone; the rest dies in forward.
    What leaves a checkpoint (for an operator outside, for another checkpoint or for the caller) is kept, too, if backward needs
    it: it is what the next checkpoint is given. So are values that the first operator of backward takes, as forward has just
    made them. A copy draws the same random numbers, since random operators are functions of a seed, and only one result of
    an operator is ever written to a buffer, that of forward.

    Needs: a captured graph.
    Guarantees: every value is the same expression, bit for bit; no operator has a checkpoint any more.
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
    """Lets the backward of a graph compute again what checkpoints say; says what that saves."""
    numbers = {found.number for node in graph.nodes if (found := checkpoint_of(node)) is not None}
    said = counted(len(numbers), "checkpoint")
    first = first_of_backward(program, graph)
    if first is None:
        _forget_checkpoints(graph)
        return f"{said} without effect: nothing is kept for a backward"
    nodes = list(graph.nodes)
    backward = dict.fromkeys(nodes[nodes.index(first) :])
    before = _kept_bytes(nodes, backward)
    place = {node: i for i, node in enumerate(nodes) if node not in backward}
    again = {node for node in place if _is_recomputed(node, backward, first)}
    copies: dict[fx.Node, fx.Node] = {}
    for user in backward:
        needed = _needed(user, again, copies) if user.op != "output" else set()
        with graph.inserting_before(user):
            for node in sorted(needed - copies.keys(), key=place.__getitem__):
                given = {source: copies.get(source, source) for source in node.all_input_nodes}
                copies[node] = copy_node(graph, node, given, name=f"{node.name}_again")
        for source in needed.intersection(user.all_input_nodes):
            user.replace_input_with(source, copies[source])
    remove_unused(graph)
    _forget_checkpoints(graph)
    after = _kept_bytes(list(graph.nodes), {**backward, **dict.fromkeys(copies.values())})
    num_run = sum(node.target is not operator.getitem for node in copies)
    return (
        f"{said}: backward runs {counted(num_run, 'operator')} of forward again, for which forward keeps "
        f"{after / 2**20:.2f} MiB, not {before / 2**20:.2f} MiB"
    )


def _is_recomputed(node: fx.Node, backward: dict[fx.Node, None], first: fx.Node) -> bool:
    """Whether backward computes a value of forward again wherever it needs it."""
    own = checkpoint_of(node)
    if own is None or own.keeps or not (is_compute(node) or node.target is operator.getitem) or first in node.users:
        return False
    for user in node.users:
        other = checkpoint_of(user)
        leaves = other is None or other.number != own.number
        if leaves and (user not in backward or _is_given_by_forward(user, node)):
            return False
    return True


def _is_given_by_forward(output: fx.Node, node: fx.Node) -> bool:
    """Whether the output of a graph has the node as its loss, or as a buffer's new value."""
    found: Any = output.args[0] if output.op == "output" else {}
    return bool(found) and (found["loss"] is node or node in found["writes"].values())


def _needed(user: fx.Node, again: set[fx.Node], copies: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """The values to be computed again for a user: those that it takes, and what those are made of that have no copy yet."""
    found: set[fx.Node] = set()
    pending = [user]
    while pending:
        new = [source for source in pending.pop().all_input_nodes if source in again and source not in found]
        found.update(new)
        pending += [node for node in new if node not in copies]
    return found


def _forget_checkpoints(graph: fx.Graph) -> None:
    for node in graph.nodes:
        node.meta.pop(CHECKPOINT, None)


def _kept_bytes(nodes: list[fx.Node], backward: dict[fx.Node, None]) -> int:
    """The bytes of what forward computes and backward reads, with values that share memory counted once."""
    kept: set[fx.Node] = set()
    for node in nodes:
        if node not in backward and node.op == "call_function" and any(user in backward for user in node.users):
            kept.add(_owner(node))
    return sum(_num_bytes(node) for node in kept if node.op == "call_function" and node.target is not ops.read)


def _owner(node: fx.Node) -> fx.Node:
    """The value in whose memory another one lies."""
    while is_compute(node) and (source := viewed(node)) is not None:
        node = source
    return node


def _num_bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return num_bytes_now(value)
