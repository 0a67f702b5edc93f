"""Segments of forward, and the costs of their recomputation, by minimum cuts."""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from mirrorc.analysis.memory.activation_peaks import MACHINE, JointTimeline
from mirrorc.analysis.memory.recomputed_values import is_forward_output, num_bytes_of, owner_of
from mirrorc.custom_ops.eager_calls import OPAQUE
from mirrorc.ir import ops
from mirrorc.ir.nodes import is_compute
from mirrorc.torch_internals import writes_argument

_PRICES = (2.0, 8.0, 32.0, 128.0, 1e7)
"""Prices of a stored byte, in multiples of the time to read a byte. Values with cheaper recomputation are recomputed.

An elementwise operator costs about 3 for each byte of its result, a product of width 1024 about 50.
"""
_NAMESPACES = ("aten", "prims", "mirrorc")
_SCALE = 1e15  # of seconds, in capacities


@dataclass(frozen=True)
class Choice:
    """A choice of the values that a segment recomputes.

    Attributes:
        saved: operators whose results are stored if backward needs them; other operators are recomputed.
        num_bytes: the bytes that need not be stored.
        seconds: of recomputation.
    """

    saved: frozenset[fx.Node]
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Segment:
    """Consecutive operators of forward. Each choice stores less than the previous one, at a higher price per byte."""

    nodes: tuple[fx.Node, ...]
    choices: tuple[Choice, ...]


class Segments:
    """Cuts forward into segments, without nodes in ``fixed`` checkpoints."""

    def __init__(self, timeline: JointTimeline, fixed: Mapping[fx.Node, Any]) -> None:
        self._timeline, self._fixed = timeline, fixed
        free = [node for node in timeline.forward if is_compute(node) or node.target is operator.getitem]
        self._nodes = [node for node in free if node not in fixed]
        self._read = {node for node in self._nodes if any(user in timeline.backward for user in node.users)}
        owners = {owner_of(node) for node in self._read}
        self._saved_bytes = {node: num_bytes_of(node) for node in owners if is_compute(node) or node in self._read}
        self._crossing = self._crossing_bytes()
        self._cut: dict[tuple[fx.Node, fx.Node], Segment] = {}

    @property
    def num_saved(self) -> int:
        return len(self._saved_bytes)

    def _crossing_bytes(self) -> list[int]:
        place = {node: i for i, node in enumerate(self._nodes)}
        ends: dict[fx.Node, int] = {}
        for node in self._nodes:
            for source in node.all_input_nodes:
                ends[owner_of(source)] = place[node]
        changes = [0] * (len(self._nodes) + 1)
        for owner, end in ends.items():
            if owner in place:
                changes[place[owner]] += num_bytes_of(owner)
                changes[end] -= num_bytes_of(owner)
        crossing, total = [], 0
        for change in changes[:-1]:
            total += change
            crossing.append(total)
        return crossing

    def cut_into(self, number: int) -> list[Segment]:
        """At most ``number`` segments, cut where few bytes cross. Each stores about equally many bytes for backward."""
        before, total = [], 0
        for node in self._nodes:
            total += self._saved_bytes.get(node, 0)
            before.append(total)
        cuts: list[int] = []
        for k in range(1, number):
            low, high = (total * (2 * k - 1) / (2 * number), total * (2 * k + 1) / (2 * number))
            inside = [i for i, size in enumerate(before) if low <= size <= high and (not cuts or i > cuts[-1])]
            if inside:
                cuts.append(min(inside, key=lambda i: (self._crossing[i], abs(before[i] - (low + high) / 2), i)))
        bounds = [0, *(cut + 1 for cut in cuts), len(self._nodes)]
        pieces = [self._nodes[start:stop] for start, stop in itertools.pairwise(bounds)]
        return [self._segment(piece) for piece in pieces if piece]

    def _segment(self, nodes: Sequence[fx.Node]) -> Segment:
        key = (nodes[0], nodes[-1])
        if key not in self._cut:
            priced = [self._choice(nodes, price) for price in _PRICES] if any(n in self._read for n in nodes) else []
            choices: list[Choice] = []
            for choice in priced:
                if choice.num_bytes > (choices[-1].num_bytes if choices else 0):
                    choices.append(choice)
            self._cut[key] = Segment(tuple(nodes), tuple(choices))
        return self._cut[key]

    def _choice(self, nodes: Sequence[fx.Node], price: float) -> Choice:
        """The cheapest choice at a price per stored byte, by a minimum cut.

        Each operator is two nodes of a network: "backward has its result", and "it is recomputed". The second has the
        cost of the operator, and needs its operands.
        """
        units = dict.fromkeys(_operator_of(node) for node in nodes)
        number = {unit: 2 + 2 * i for i, unit in enumerate(units)}
        inside = set(nodes)
        operands = (source for unit in units for source in unit.all_input_nodes)
        sources = dict.fromkeys(source for source in operands if _operator_of(source) not in number)
        outside = {source: 2 + 2 * len(units) + i for i, source in enumerate(sources)}
        network = Network(2 + 2 * len(units) + len(outside))
        for unit, has in number.items():
            parts = [unit, *(user for user in unit.users if user in inside and user.target is operator.getitem)]
            if any(part in self._read for part in parts):
                network.join(0, has, UNCUTTABLE)
            network.join(has, has + 1, _capacity(self._bytes_to_keep(unit, parts) * price * MACHINE.seconds_per_byte))
            may_run = is_copied(unit) and all(self._stays(part, inside) for part in parts)
            network.join(has + 1, 1, _capacity(self._timeline.seconds[unit]) if may_run else UNCUTTABLE)
            for source in unit.all_input_nodes:
                needed = outside[source] if source in outside else number[_operator_of(source)]
                network.join(has + 1, needed, UNCUTTABLE)
        for source, has in outside.items():
            network.join(has, 1, _capacity(self._bytes_from_outside(source) * price * MACHINE.seconds_per_byte))
        reached = network.side_of_source()
        again = {unit for unit, has in number.items() if has + 1 in reached}
        saved_units = {unit for unit, has in number.items() if has in reached and unit not in again}
        saved_before = {
            owner_of(part) for part in nodes if part in self._saved_bytes or _operator_of(part) in saved_units
        }
        still = {owner_of(part) for part in nodes if _operator_of(part) in saved_units} & saved_before
        saved = sum(self._saved_bytes.get(owner, 0) for owner in saved_before - still if owner in inside)
        saved -= sum(num_bytes_of(owner) for owner in still if owner not in self._saved_bytes and owner in inside)
        saved -= sum(self._bytes_from_outside(source) for source, has in outside.items() if has in reached)
        seconds = math.fsum(self._timeline.seconds[unit] for unit in again)  # the same in whatever order
        return Choice(frozenset(units.keys() - again), saved, seconds)

    def _bytes_to_keep(self, unit: fx.Node, parts: Sequence[fx.Node]) -> int:
        if any(self._timeline.first in part.users for part in parts):
            return 0
        return sum(num_bytes_of(owner) for owner in {owner_of(part) for part in parts} if not _is_free(owner))

    def _bytes_from_outside(self, source: fx.Node) -> int:
        owner = owner_of(source)
        is_saved = owner in self._saved_bytes or owner in self._fixed
        return 0 if _is_free(owner) or is_saved else num_bytes_of(owner)

    def _stays(self, node: fx.Node, inside: set[fx.Node]) -> bool:
        if self._timeline.first in node.users:
            return False
        backward = self._timeline.backward
        return all(not is_forward_output(user, node) if user in backward else user in inside for user in node.users)


def is_copied(node: fx.Node) -> bool:
    """True for an operator that may run twice: an operator of torch or mirrorc that writes no argument.

    Random operators are functions of a seed since capture. Operators of other libraries may have hidden effects. So may
    mirrorc's operators that run plain PyTorch (`OPAQUE`).
    """
    target: Any = node.target
    if not is_compute(node) or target in OPAQUE:
        return False
    return target.namespace in _NAMESPACES and not writes_argument(target)


def _operator_of(node: fx.Node) -> fx.Node:
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_free(owner: fx.Node) -> bool:
    """Backward has arguments and variables in any case."""
    return owner.op == "placeholder" or owner.target is ops.read


def _capacity(seconds: float) -> int:
    return min(round(seconds * _SCALE), UNCUTTABLE)


UNCUTTABLE = 2**62
"""The capacity of an edge that no cut may contain."""


class Network:
    """A directed graph of numbered nodes with edge capacities; node 0 is the source, node 1 the sink."""

    def __init__(self, num_nodes: int) -> None:
        self._edges_of: list[list[int]] = [[] for _ in range(num_nodes)]
        self._ends: list[int] = []
        self._left: list[int] = []  # remaining capacities; the edge back is the next of each pair

    def join(self, start: int, end: int, capacity: int) -> None:
        self._edges_of[start].append(len(self._ends))
        self._edges_of[end].append(len(self._ends) + 1)
        self._ends += (end, start)
        self._left += (capacity, 0)

    def side_of_source(self) -> set[int]:
        """The source's side of the minimum cut nearest to the source."""
        while True:
            levels = self._levels()
            if levels[1] < 0:
                return {node for node, level in enumerate(levels) if level >= 0}
            self._saturate(levels)

    def _levels(self) -> list[int]:
        levels = [-1] * len(self._edges_of)
        levels[0] = 0
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            for edge in self._edges_of[node]:
                end = self._ends[edge]
                if self._left[edge] and levels[end] < 0:
                    levels[end] = levels[node] + 1
                    waiting.append(end)
        return levels

    def _saturate(self, levels: list[int]) -> None:
        tried = [0] * len(self._edges_of)
        way: list[int] = []
        node = 0
        while True:
            if node == 1:
                least = min(self._left[edge] for edge in way)
                for edge in way:
                    self._left[edge] -= least
                    self._left[edge ^ 1] += least
                way, node = [], 0
                continue
            onward = self._next_edge(node, levels, tried)
            if onward is not None:
                way.append(onward)
                node = self._ends[onward]
            elif not way:
                return
            else:
                back = way.pop()
                node = self._ends[back ^ 1]
                tried[node] += 1

    def _next_edge(self, node: int, levels: list[int], tried: list[int]) -> int | None:
        edges = self._edges_of[node]
        while tried[node] < len(edges):
            edge = edges[tried[node]]
            if self._left[edge] and levels[self._ends[edge]] == levels[node] + 1:
                return edge
            tried[node] += 1
        return None
