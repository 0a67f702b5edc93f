"""Predicts peak bytes of a captured graph's activations, for any choice of recomputation."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch import fx

from mirrorc.analysis.cost.work import Machine, seconds_of_operator
from mirrorc.analysis.graph.aliases import viewed
from mirrorc.analysis.graph.cuts import first_of_backward
from mirrorc.analysis.memory.recomputed_values import num_bytes_of, recomputed_values
from mirrorc.analysis.memory.workspaces import workspace_bytes
from mirrorc.ir import ops
from mirrorc.ir.nodes import Checkpoint, checkpoint_of, is_compute
from mirrorc.ir.program import Program

MACHINE = Machine(seconds_per_multiplication=2e-11, seconds_per_byte=1e-10)
"""A reference processor for the cost of operators. It is not measured, so that all workers choose equally."""


@dataclass(frozen=True)
class Peak:
    num_bytes: int
    seconds: float


class JointTimeline:
    """A captured graph in execution order, with the lifetimes of its values.

    Values and workspaces count as in `step.memory()`. Gradients are assumed to be in buckets. Fusion, regions and
    updates are ignored.
    """

    def __init__(self, program: Program, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self._place = {node: place for place, node in enumerate(self.nodes)}
        first = first_of_backward(program, graph)
        assert first is not None, "a training call has a backward"
        self.first = first
        self.forward = self.nodes[: self._place[first]]
        self.backward = dict.fromkeys(self.nodes[self._place[first] :])
        self.seconds = {node: seconds_of_operator(node, MACHINE) for node in self.forward}
        self._inputs = [[self._place[source] for source in node.all_input_nodes] for node in self.nodes]
        self._viewed = [self._place[source] if (source := _viewed(node)) is not None else None for node in self.nodes]
        self._is_operator = [is_compute(node) or node.target is operator.getitem for node in self.nodes]
        self._owners = [self.owner(place) for place in range(len(self.nodes))]
        self.sizes = self._sizes()
        is_on_cpu = any(device.torch_device.type == "cpu" for device in program.devices)
        self._workspaces = {
            place: num_bytes
            for place, node in enumerate(self.nodes)
            if is_on_cpu and is_compute(node) and (num_bytes := _workspace_bytes(node))
        }

    def _sizes(self) -> list[int]:
        output: Any = self.nodes[-1].args[0]
        gradients: set[fx.Node] = set(output["gradients"].values())
        in_buckets = {self.owner(self._place[node]) for node in gradients}
        sizes = []
        for place, node in enumerate(self.nodes):
            is_new = self._is_operator[place] or node.target in ops.MEETINGS
            has_memory = is_new and self._viewed[place] is None and place not in in_buckets
            sizes.append(num_bytes_of(node) if has_memory else 0)
        return sizes

    def owner(self, place: int) -> int:
        while (source := self._viewed[place]) is not None:
            place = source
        return place

    def again(self, checkpoints: Mapping[fx.Node, Checkpoint]) -> list[int]:
        recomputed = recomputed_values(self.forward, self.backward, self.first, checkpoints.get)
        return sorted(self._place[node] for node in recomputed)

    def peak(self, checkpoints: Mapping[fx.Node, Checkpoint]) -> Peak:
        again = set(self.again(checkpoints))
        runs, seconds = self._runs(again)
        offset = len(self.nodes)
        owners = {place: self._owners[place] for place in range(len(self.forward))}
        for place in sorted(again):
            source = self._viewed[place]
            owners[offset + place] = offset + place if source is None else owners[source + offset * (source in again)]
        for place in range(len(self.forward), offset):
            source = self._viewed[place]
            owners[place] = place if source is None else owners[source + offset * (source in again)]
        last: dict[int, int] = {}  # by memory, the moment of its last use
        used: set[int] = set()
        for moment in range(len(runs) - 1, -1, -1):
            value, inputs = runs[moment]
            if value not in used and value < len(self.forward) and self._is_operator[value]:
                continue  # nothing needs it any more, so it is removed
            for source in inputs:
                used.add(source)
                last.setdefault(owners[source], moment)
        total = most = 0
        for moment, (value, inputs) in enumerate(runs):
            size = self.sizes[value % offset]
            workspace = self._workspaces.get(value % offset, 0)
            if size and value in last:
                total += size
                most = max(most, total + workspace)
            elif value >= len(self.forward):  # unused values of forward are removed
                most = max(most, total + size + workspace)
            for memory in {owners[source] for source in inputs}:
                if last.get(memory) == moment:
                    total -= self.sizes[memory % offset]
        return Peak(most, seconds)

    def _runs(self, again: Set[int]) -> tuple[list[tuple[int, list[int]]], float]:
        """Each run's index and its inputs' indices, in order; and the seconds of recomputation.

        The index of a recomputed value is larger by the number of nodes.
        """
        offset, seconds = len(self.nodes), 0.0
        runs = [(place, self._inputs[place]) for place in range(len(self.forward))]
        copies: set[int] = set()
        for place in range(len(self.forward), offset):
            is_output = place == offset - 1
            for source in [] if is_output else sorted(self._needed(place, again, copies)):
                taken = [operand + offset * (operand in again) for operand in self._inputs[source]]
                runs.append((source + offset, taken))
                copies.add(source)
                seconds += self.seconds[self.nodes[source]]
            taken = [operand + offset * (operand in again and not is_output) for operand in self._inputs[place]]
            runs.append((place, taken))
        return runs, seconds

    def _needed(self, user: int, again: Set[int], copies: Set[int]) -> set[int]:
        needed: set[int] = set()
        pending = [user]
        while pending:
            new = [i for i in self._inputs[pending.pop()] if i in again and i not in needed and i not in copies]
            needed.update(new)
            pending += new
        return needed


def predicted_peak(program: Program) -> int:
    """Peak bytes of activations in the captured program's largest shard, with its checkpoints."""
    peaks = []
    for graph in program.shard_graphs:
        checkpoints = {node: checkpoint for node in graph.nodes if (checkpoint := checkpoint_of(node)) is not None}
        peaks.append(JointTimeline(program, graph).peak(checkpoints).num_bytes)
    return max(peaks)


def _workspace_bytes(node: fx.Node) -> int:
    args = fx.node.map_arg(node.args, lambda source: source.meta["val"])
    return workspace_bytes(node.target, args, node.meta["val"])


def _viewed(node: fx.Node) -> fx.Node | None:
    is_value = is_compute(node) or node.target is operator.getitem
    return viewed(node) if is_value else None
