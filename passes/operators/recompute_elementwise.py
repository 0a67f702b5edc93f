"""Lets backward compute elementwise values again, instead of reading what forward would store for it alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from mirrorc.analysis.graph.backward import first_of_backward
from mirrorc.analysis.graph.dying_arguments import PRODUCTS
from mirrorc.analysis.graph.elementwise import is_cheap, is_fused
from mirrorc.analysis.memory.recomputed_values import num_bytes_of, owner_of
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied, copy_node, remove_unused
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import counted

_MOST_OPERATORS = 16
"""How many operators are run again for one value at most."""

_SMALL = 8
"""How many times smaller than a value those are whose memory does not count, such as a number for each of its rows."""


@dataclass(frozen=True)
class RecomputeElementwise:
    """Computes again in backward what follows from other values by a few elementwise operators::

        mm   = aten.mm(x, w)                               mm    = aten.mm(x, w)
        lse  = ...                                         lse   = ...
        sub  = aten.sub(mm, lse)                   ->
        exp  = aten.exp(sub)    # in backward              again = aten.sub(mm, lse)
                                                           exp   = aten.exp(again)

    Forward has ``mm`` in memory in any case; ``sub`` it would write for backward alone, which is a pass over all its elements.
    Fused with what reads it, it costs backward nothing, since ``mm`` is as large. So it is with the logarithm of a softmax over
    many classes, with what RMSNorm multiplies by its weight, with a SiLU that gates another value, and with the places of maxima
    that pooling finds: 64-bit numbers, made of the 8 bits that say where in its window each one is.

    A value is computed again if forward stores it for nothing but backward, and backward then moves fewer bytes: to keep it,
    it is written and read; to compute it, other values are read, of which those that are not in memory anyway are written
    first. Forward keeps no more memory than before, but for small values. Each operator of backward gets a copy of its own,
    with which it is fused.

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
    return [value.name for value in _Recomputing(graph, first).run()] if first is not None else []


class _Recomputing:
    """Looks at the values of a forward in their order, so that what each is made of has been decided."""

    def __init__(self, graph: fx.Graph, first_of_backward: fx.Node) -> None:
        nodes = list(graph.nodes)
        self._graph = graph
        self._place = {node: i for i, node in enumerate(nodes)}
        self._backward = set(nodes[self._place[first_of_backward] :])
        self._sharing: dict[
            fx.Node, list[fx.Node]
        ] = {}  # for a value of forward, those in its memory, itself the first
        for node in nodes[: self._place[first_of_backward]]:
            self._sharing.setdefault(owner_of(node), []).append(node)

    def run(self) -> list[fx.Node]:
        """Changes the graph; the values that backward computes again."""
        done = [value for value in self._sharing if self._moves_to_backward(value)]
        remove_unused(self._graph)
        return done

    def _moves_to_backward(self, value: fx.Node) -> bool:
        """Lets backward compute a value again if that is better."""
        if not is_cheap(value) or not self._is_stored_for_backward_alone(value):
            return False
        sources = self._sources(self._operators(value))
        if not self._is_better(value, sources):
            return False
        for user, shared in list(self._uses_in_backward(value)):
            user.replace_input_with(shared, self._again(self._operators(shared), user))
        return True

    def _uses_in_backward(self, value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """The nodes of backward that use a value or a view of it in forward, and what they use."""
        return ((user, shared) for shared in self._sharing[value] for user in shared.users if user in self._backward)

    def _is_stored_for_backward_alone(self, value: fx.Node) -> bool:
        users = {user for shared in self._sharing[value] for user in shared.users}.difference(self._sharing[value])
        return not self._backward.isdisjoint(users) and all(map(is_fused, users))

    def _operators(self, value: fx.Node) -> list[fx.Node]:
        """What has to be run again for a value, in order: cheap operators and their views, back to what is in memory."""
        own, found, waiting = owner_of(value), {value}, [value]
        while waiting:
            for source in waiting.pop().all_input_nodes:
                owner = owner_of(source)
                is_run = owner is own or (is_cheap(owner) and not self._is_kept(owner) and not _is_small(owner, own))
                if source not in found and is_run and len(found) < _MOST_OPERATORS:
                    found.add(source)
                    waiting.append(source)
        return sorted(found, key=self._place.__getitem__)

    def _is_kept(self, value: fx.Node) -> bool:
        """Whether a value is in memory when backward needs it, whatever else is computed again."""
        return self._is_given(value) or next(self._uses_in_backward(owner_of(value)), None) is not None

    @staticmethod
    def _is_given(value: fx.Node) -> bool:
        owner = owner_of(value)
        return owner.op == "placeholder" or owner.target is ops.read

    @staticmethod
    def _sources(operators: list[fx.Node]) -> list[fx.Node]:
        """The values that these operators read from memory, each memory once."""
        read = (source for node in operators for source in node.all_input_nodes if source not in operators)
        return list(dict.fromkeys(map(owner_of, read)))

    def _is_better(self, value: fx.Node, sources: list[fx.Node]) -> bool:
        """Whether to read these sources takes less time than to store and read a value, and no more memory."""
        kept, moved = 0, 0
        for source in sources:
            num_bytes = num_bytes_of(source)
            is_kept = self._is_kept(source)
            kept += 0 if is_kept or _is_small(source, value) else num_bytes
            moved += num_bytes if is_kept or source.target in PRODUCTS else 2 * num_bytes
        return moved < 2 * num_bytes_of(value) and kept <= num_bytes_of(value)

    def _again(self, operators: list[fx.Node], user: fx.Node) -> fx.Node:
        """Copies operators to the place of a user in backward; the value of the last one."""
        values: dict[fx.Node, fx.Node] = {}
        with self._graph.inserting_before(user):
            for node in operators:
                given = {source: values.get(source, source) for source in node.all_input_nodes}
                values[node] = copy_node(self._graph, node, given, name=f"{node.name}_again")
        return values[operators[-1]]


def _is_small(source: fx.Node, value: fx.Node) -> bool:
    return num_bytes_of(source) * _SMALL <= num_bytes_of(value)
