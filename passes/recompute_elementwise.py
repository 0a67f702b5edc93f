"""Lets backward compute elementwise values again, instead of reading what forward would store for it alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from mirrorc.analysis.aliases import viewed
from mirrorc.analysis.backward import first_of_backward
from mirrorc.ir.graph_edits import copied, copy_node, remove_unused
from mirrorc.ir.nodes import is_compute
from mirrorc.ir.program import Program, Stage
from mirrorc.printing.wording import counted
from mirrorc.torch_internals import num_bytes_now

aten, prims = torch.ops.aten, torch.ops.prims

_RECOMPUTED = frozenset(
    {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.alias.default, prims.convert_element_type.default}
)
"""Elementwise operators that take less time than reading their result from memory."""

_FUSED = _RECOMPUTED | {aten.exp.default, aten.sum.dim_IntList, aten.amax.default, aten.gather.default}
"""Operators that a backend fuses with the elementwise operators before them, whose result is then stored nowhere."""

_STORED = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default}
)
"""Operators that no backend fuses with what reads their result, which is stored in any case."""

_LEAST_RATIO = 16
"""How many times smaller than the recomputed value the other operands must be, which are stored for it."""


@dataclass(frozen=True)
class RecomputeElementwise:
    """Computes again in backward what follows from a stored value by a few elementwise operators::

        mm   = aten.mm(x, w)                               mm    = aten.mm(x, w)
        lse  = ...                                         lse   = ...
        sub  = aten.sub(mm, lse)                   ->
        exp  = aten.exp(sub)    # in backward              again = aten.sub(mm, lse)
                                                           exp   = aten.exp(again)

    Forward has ``mm`` in memory in any case; ``sub`` it would write for backward alone, which is a pass over all its elements.
    Fused with what reads it, it costs backward nothing, since ``mm`` is as large. So it is with the logarithm of a softmax over
    many classes.

    Needs: a captured graph.
    Guarantees: every value is the same expression, bit for bit.

    Attributes:
        wanted: whether this makes the generated code faster, as it does where elementwise operators are fused; otherwise the
            pass leaves the program as it is.
    """

    wanted: bool = True
    name: str = field(default="recompute-elementwise", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)

    def run(self, program: Program) -> Program:
        if not self.wanted:
            reason = "nothing is recomputed: wanted is not set, as it is where the backend does not fuse operators"
            return program.with_remarks(reason, is_kept=False)
        graphs = tuple(copied(graph) for graph in program.shard_graphs)
        names = [_recompute(program, graph) for graph in graphs]
        if not any(names):
            return program.with_remarks("forward stores no elementwise value for backward alone", is_kept=False)
        said = f"{counted(len(names[0]), 'value')} computed again in backward, not stored for it: {', '.join(names[0])}"
        return program.evolve(shard_graphs=graphs).with_remarks(said)


def _recompute(program: Program, graph: fx.Graph) -> list[str]:
    """Lets the backward of a graph recompute what it can; the names of these values."""
    first = first_of_backward(program, graph)
    if first is None:
        return []
    backward, is_backward = set[fx.Node](), False
    for node in graph.nodes:
        is_backward = is_backward or node is first
        if is_backward:
            backward.add(node)
    done = []
    for value in [node for node in graph.nodes if node not in backward and node.target in _RECOMPUTED]:
        users = [user for user in value.users if user in backward and is_compute(user)]
        chain = _chain(value, backward)
        if users and chain and all(_is_fused(user, backward) for node in chain for user in node.users):
            for user in users:
                user.replace_input_with(value, _again(graph, chain, user))
            done.append(value.name)
    remove_unused(graph)
    return done


def _is_fused(user: fx.Node, backward: set[fx.Node]) -> bool:
    """Whether the use of a value does not make a backend store it."""
    return user.target in _FUSED if user not in backward else is_compute(user)


def _chain(value: fx.Node, backward: set[fx.Node]) -> list[fx.Node]:
    """The operators that make a value from one that is stored anyway, in order; none if they would take more to be stored."""
    chain: list[fx.Node] = []
    node = value
    while node.target in _RECOMPUTED:
        chain.insert(0, node)
        whole = [source for source in dict.fromkeys(node.all_input_nodes) if not _is_small(source, value)]
        if len(whole) != 1:
            return []
        node = whole[0]
    is_kept = any(user in backward for user in node.users) or node.op == "placeholder"
    return chain if is_kept or (_is_product(node) and _num_bytes(node) <= _num_bytes(value)) else []


def _is_product(node: fx.Node) -> bool:
    found: fx.Node | None = node
    while found is not None:
        if found.target in _STORED:
            return True
        found = viewed(found) if is_compute(found) else None
    return False


def _is_small(source: fx.Node, value: fx.Node) -> bool:
    return _num_bytes(source) * _LEAST_RATIO <= _num_bytes(value)


def _num_bytes(node: fx.Node) -> int:
    return num_bytes_now(node.meta["val"])


def _again(graph: fx.Graph, chain: list[fx.Node], user: fx.Node) -> fx.Node:
    """Copies operators to the place of a user in backward; the value of the last one."""
    values: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(user):
        for node in chain:
            given = {source: values.get(source, source) for source in node.all_input_nodes}
            values[node] = copy_node(graph, node, given, name=f"{node.name}_again")
    return values[chain[-1]]
