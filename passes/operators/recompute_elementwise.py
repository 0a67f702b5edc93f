"""Recomputes elementwise values in backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.aliases import viewed
from mirrorc.analysis.graph.cuts import first_of_backward
from mirrorc.analysis.graph.dying_arguments import PRODUCTS
from mirrorc.analysis.memory.recomputed_values import num_bytes_of, owner_of
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied, copy_node, remove_unused
from mirrorc.ir.nodes import is_compute
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import counted
from mirrorc.torch_internals import pools_maxima, tells_places_of_maxima

aten, prims = torch.ops.aten, torch.ops.prims

_CHEAP = frozenset({
    aten.abs.default, aten.add.Scalar, aten.add.Tensor, aten.clamp_max.default, aten.clamp_min.default,
    aten.div.Scalar, aten.div.Tensor, aten.exp.default, aten.ge.Scalar, aten.gt.Scalar, aten.le.Scalar,
    aten.lt.Scalar, aten.maximum.default, aten.minimum.default, aten.mul.Scalar, aten.mul.Tensor, aten.neg.default,
    aten.reciprocal.default, aten.relu.default, aten.rsqrt.default, aten.sigmoid.default, aten.sqrt.default,
    aten.sub.Scalar, aten.sub.Tensor, aten.where.self, prims.convert_element_type.default,
})  # fmt: skip
"""Elementwise operators that take less time than writing and reading their result."""

_TAKING = frozenset({
    aten.amax.default, aten.amin.default, aten.cat.default, aten.gather.default, aten.mean.dim,
    aten.scatter_add.default, aten.sum.default, aten.sum.dim_IntList, aten.var_mean.correction,
})  # fmt: skip
"""Other operators that backends fuse with elementwise operators before them, or with short-lived operands."""


def is_cheap(node: fx.Node) -> bool:
    """True for a value that is faster to recompute than to store and read."""
    return node.target in _CHEAP or (is_compute(node) and tells_places_of_maxima(node.target))


def is_fused(user: fx.Node) -> bool:
    """True if backends fuse a user with its operands' operators, so that the operands need no memory."""
    if not is_compute(user):
        return False
    if viewed(user) is not None:
        return all(map(is_fused, user.users))
    target: Any = user.target
    return torch.Tag.pointwise in target.tags or target in _TAKING or is_cheap(user) or pools_maxima(target)


_MOST_OPERATORS = 16
_SMALL = 8
"""A source counts as free to save if it is this many times smaller than the value, such as one number per row."""


@dataclass(frozen=True)
class RecomputeElementwise:
    """Recomputes values in backward from a few elementwise operators, instead of saving them::

        mm   = aten.mm(x, w)                               mm    = aten.mm(x, w)
        lse  = ...                                         lse   = ...
        sub  = aten.sub(mm, lse)                   ->
        exp  = aten.exp(sub)    # in backward              again = aten.sub(mm, lse)
                                                           exp   = aten.exp(again)

    Here forward would write ``sub`` only for backward. A value is recomputed if this moves fewer bytes than writing and
    reading the value. Recomputation moves the bytes of the sources that it reads. Sources that must be stored for it
    count, too.

    Guarantees: every value is the same expression, bit for bit. Forward saves no more bytes, except for small values.
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
        remark = (
            f"{counted(len(names[0]), 'value')} computed again in backward, not stored for it: {', '.join(names[0])}"
        )
        return program.evolve(shard_graphs=graphs).with_remarks(remark)


def _recompute(program: Program, graph: fx.Graph) -> list[str]:
    first = first_of_backward(program, graph)
    return [value.name for value in _Recomputation(graph, first).run()] if first is not None else []


class _Recomputation:
    """Decides which values of forward are recomputed; sources come before users."""

    def __init__(self, graph: fx.Graph, first_of_backward: fx.Node) -> None:
        nodes = list(graph.nodes)
        self._graph = graph
        self._place = {node: i for i, node in enumerate(nodes)}
        self._backward = set(nodes[self._place[first_of_backward] :])
        self._sharing: dict[fx.Node, list[fx.Node]] = {}  # for each value of forward, itself and its views
        for node in nodes[: self._place[first_of_backward]]:
            self._sharing.setdefault(owner_of(node), []).append(node)

    def run(self) -> list[fx.Node]:
        done = [value for value in self._sharing if self._recompute_if_better(value)]
        remove_unused(self._graph)
        return done

    def _recompute_if_better(self, value: fx.Node) -> bool:
        if not is_cheap(value) or not self._is_stored_for_backward_alone(value):
            return False
        sources = self._sources(self._operators(value))
        if not self._is_better(value, sources):
            return False
        for user, shared in list(self._uses_in_backward(value)):
            user.replace_input_with(shared, self._again(self._operators(shared), user))
        return True

    def _uses_in_backward(self, value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        return ((user, shared) for shared in self._sharing[value] for user in shared.users if user in self._backward)

    def _is_stored_for_backward_alone(self, value: fx.Node) -> bool:
        users = {user for shared in self._sharing[value] for user in shared.users}.difference(self._sharing[value])
        return not self._backward.isdisjoint(users) and all(map(is_fused, users))

    def _operators(self, value: fx.Node) -> list[fx.Node]:
        """The operators and views to rerun for a value, in order. The search ends at small, stored or expensive values."""
        root, operators, waiting = owner_of(value), {value}, [value]
        while waiting:
            for source in waiting.pop().all_input_nodes:
                owner = owner_of(source)
                is_run = owner is root or (
                    is_cheap(owner) and not self._is_in_memory(owner) and not _is_small(owner, root)
                )
                if source not in operators and is_run and len(operators) < _MOST_OPERATORS:
                    operators.add(source)
                    waiting.append(source)
        return sorted(operators, key=self._place.__getitem__)

    def _is_in_memory(self, value: fx.Node) -> bool:
        owner = owner_of(value)
        is_input = owner.op == "placeholder" or owner.target is ops.read
        return is_input or next(self._uses_in_backward(owner), None) is not None

    @staticmethod
    def _sources(operators: list[fx.Node]) -> list[fx.Node]:
        read = (source for node in operators for source in node.all_input_nodes if source not in operators)
        return list(dict.fromkeys(map(owner_of, read)))

    def _is_better(self, value: fx.Node, sources: list[fx.Node]) -> bool:
        saved, moved = 0, 0
        for source in sources:
            num_bytes = num_bytes_of(source)
            in_memory = self._is_in_memory(source)
            saved += 0 if in_memory or _is_small(source, value) else num_bytes
            moved += num_bytes if in_memory or source.target in PRODUCTS else 2 * num_bytes
        return moved < 2 * num_bytes_of(value) and saved <= num_bytes_of(value)

    def _again(self, operators: list[fx.Node], user: fx.Node) -> fx.Node:
        values: dict[fx.Node, fx.Node] = {}
        with self._graph.inserting_before(user):
            for node in operators:
                copied_operands = {source: values.get(source, source) for source in node.all_input_nodes}
                values[node] = copy_node(self._graph, node, copied_operands, name=f"{node.name}_again")
        return values[operators[-1]]


def _is_small(source: fx.Node, value: fx.Node) -> bool:
    return num_bytes_of(source) * _SMALL <= num_bytes_of(value)
