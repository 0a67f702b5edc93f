"""Costs of a step's calls, measured on one program and valid for all bucket plans of its model.

Plans cut regions differently, but keep the order of operators, so times of regions are stored as a `Pace`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from mirrorc.analysis.communication.compressed_sums import num_bytes_sent
from mirrorc.analysis.cost.line import Line
from mirrorc.analysis.cost.link_speed import LinkSpeed, Messages, ring_all_gather, ring_all_reduce, ring_all_to_all
from mirrorc.analysis.cost.work import Machine, seconds_of_graph
from mirrorc.analysis.gradients.sent_factors import factor_bytes, packs_of, rows_of
from mirrorc.analysis.gradients.sparse_update_rows import bytes_of_rows_sent
from mirrorc.analysis.gradients.tiled_updates import part_elements_of
from mirrorc.ir import ops
from mirrorc.ir.gradient_forms import form_of
from mirrorc.ir.nodes import bucket_of, is_region_call, launch_of, name_of, pack_of, region_calls, region_of
from mirrorc.ir.program import Program
from mirrorc.torch_internals import num_bytes_now, size_now

_WHOLE = ops.update.__name__
_IN_PARTS = f"{_WHOLE} in parts"


class UnknownCostError(ValueError):
    pass


@dataclass(frozen=True)
class Pace:
    """The progress of forward or backward: after each region, the fraction of work done and the seconds."""

    parts: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, work: Sequence[float], seconds: Sequence[float]) -> Pace:
        parts = list(itertools.accumulate(work, initial=0.0))
        if not parts[-1]:  # nothing but views: by number
            parts = [float(i) for i in range(len(parts))]
        return cls(tuple(part / parts[-1] for part in parts), tuple(itertools.accumulate(seconds, initial=0.0)))

    def at(self, part: float) -> float:
        place = min(bisect.bisect_right(self.parts, part), len(self.parts) - 1)
        low, high = self.parts[place - 1], self.parts[place]
        within = min(1.0, (part - low) / (high - low)) if high > low else 1.0
        return self.seconds[place - 1] + within * (self.seconds[place] - self.seconds[place - 1])


@dataclass(frozen=True)
class StepCosts:
    """``paces`` are by replica and phase, ``lines`` by `kind_of_call`."""

    starts: tuple[float, ...]
    paces: tuple[Mapping[str, Pace], ...]
    lines: Mapping[str, Line]
    machine: Machine
    link: LinkSpeed

    def durations(self, program: Program) -> ProgramDurations:
        """For a lowered program of the same model. Raises `UnknownCostError` if a phase of a replica was not measured."""
        return ProgramDurations(self, program)


class ProgramDurations:
    """Implements `mirrorc.analysis.cost.simulation.Durations`."""

    def __init__(self, costs: StepCosts, program: Program) -> None:
        self._costs, self._program = costs, program
        self._of_regions: list[dict[fx.Node, float]] = []
        works = works_of_regions(program, costs.machine)
        for replica, module in enumerate(program.device_graphs.values()):
            self._of_regions.append(dict(self._regions(replica, module.graph, works)))

    def _regions(self, replica: int, graph: fx.Graph, works: Mapping[str, float]) -> Iterator[tuple[fx.Node, float]]:
        for phase, nodes in calls_by_phase(self._program, graph).items():
            pace = self._costs.paces[replica].get(phase)
            if pace is None:
                raise UnknownCostError(f"no {phase} of replica {replica} was measured")
            whole = Pace.of([works[region_of(node)] for node in nodes], [0.0] * len(nodes))
            times = itertools.pairwise([pace.at(part) for part in whole.parts])
            yield from ((node, after - before) for node, (before, after) in zip(nodes, times, strict=True))

    def start_seconds(self, replica: int) -> float:
        return self._costs.starts[replica]

    def seconds_of(self, replica: int, node: fx.Node) -> float:
        if is_region_call(node):
            return self._of_regions[replica][node]
        if node.target is ops.wait and launch_of(node).target is ops.gather_factors:
            if part_elements_of(node) is not None:  # the update makes them
                return 0.0
            return self._seconds_of_products(bucket_of(node))
        if node.target is ops.wait and launch_of(node).target is ops.scatter_sums:
            num_bytes = num_bytes_of_call(self._program, replica, node)
            return (self._program.workers.num_workers + 1) * num_bytes * self._costs.machine.seconds_per_byte
        if node.target is ops.wait and launch_of(node).target is ops.gather_parameters:
            return 0.0  # received elements are already in place
        kind, size = kind_of_call(self._program, node), num_bytes_of_call(self._program, replica, node)
        line = self._costs.lines.get(kind)
        if line is None and node.target is ops.update:
            return self._seconds_of_update(node, kind, size)
        return line.at(size) if line is not None else 0.0

    def _seconds_of_update(self, node: fx.Node, kind: str, size: int) -> float:
        is_in_parts = kind.startswith(_IN_PARTS)
        other = kind.replace(_IN_PARTS, _WHOLE, 1) if is_in_parts else kind.replace(_WHOLE, _IN_PARTS, 1)
        line = self._costs.lines.get(other)
        if line is None:
            return 0.0
        products = self._seconds_of_products(bucket_of(node))
        return max(0.0, line.at(size) + (products if is_in_parts else -products))

    def _seconds_of_products(self, bucket: int) -> float:
        machine, program = self._costs.machine, self._program
        num_workers, num_devices = program.workers.num_workers, program.num_replicas
        work = 0.0
        for pack in packs_of(program, bucket):
            for gradient, slot in zip(pack.args, program.buckets[bucket].slots, strict=False):
                assert isinstance(gradient, fx.Node), "gradients are packed"
                form, rows = form_of(gradient), rows_of(gradient) or []
                num_rows = sum(size_now(part[0].shape[0]) for part in rows)
                whole = torch.empty(slot.shape, device="meta")
                work += form.num_multiplications(whole, num_rows) * machine.seconds_per_multiplication
                work += sum(num_bytes_now(factor) for part in rows for factor in part) * machine.seconds_per_byte
        written = program.buckets[bucket].num_bytes * machine.seconds_per_byte
        num_makers = num_devices * (num_workers if program.buckets[bucket].part is not None else 1)
        return (work * num_workers + written) / num_makers

    def flight_seconds(self, node: fx.Node) -> float:
        return sum(map(self._costs.link.seconds_of, self._collectives_of(node)))

    def _collectives_of(self, node: fx.Node) -> Iterator[Messages]:
        num_workers, index = self._program.workers.num_workers, bucket_of(node)
        num_bytes = self._program.buckets[index].num_bytes
        if node.target in (ops.exchange, ops.exchange_payload):
            yield ring_all_reduce(num_bytes_sent(self._program, node), num_workers)
        elif node.target is ops.gather_largest:
            yield ring_all_gather(num_bytes_sent(self._program, node), num_workers)
        elif node.target is ops.scatter_sums:
            yield ring_all_to_all(num_bytes, num_workers)
        elif node.target is ops.gather_parameters:
            yield ring_all_gather(num_bytes / num_workers, num_workers)
        elif node.target is ops.gather_factors:
            yield ring_all_gather(sum(map(factor_bytes, packs_of(self._program, index))), num_workers)
        else:
            raise UnknownCostError(f"it is not known how long {name_of(node)} takes between workers")


def works_of_regions(program: Program, machine: Machine) -> dict[str, float]:
    return {name: seconds_of_graph(region.graph_module.graph, machine) for name, region in program.regions.items()}


def calls_by_phase(program: Program, graph: fx.Graph) -> dict[str, list[fx.Node]]:
    of_phase: dict[str, list[fx.Node]] = {}
    for node in region_calls(graph):
        of_phase.setdefault(program.regions[region_of(node)].phase, []).append(node)
    return of_phase


def kind_of_call(program: Program, node: fx.Node) -> str:
    """Calls of one kind take the same time per byte."""
    kind = name_of(node)
    if node.target is ops.wait:
        kind = f"wait {name_of(launch_of(node))}"
    if "bucket" not in node.kwargs:
        return kind
    bucket = program.buckets[bucket_of(node)]
    if node.kwargs.get("part_elements"):
        kind = _IN_PARTS
    return f"{kind} {bucket.rule.label} {bucket.dtype}{' of factors' if bucket.is_sent_as_factors else ''}"


def num_bytes_of_call(program: Program, replica: int, node: fx.Node) -> int:
    """The bytes that determine a call's time."""
    if node.target in (*ops.EXCHANGES_OF_SUMS, ops.scatter_sums, ops.commit):
        return 0
    if "bucket" not in node.kwargs:
        return sum(num_bytes_now(source.meta.get("val")) for source in node.all_input_nodes)
    bucket = program.buckets[bucket_of(node)]
    if node.target is ops.gather_factors:  # it copies them into a message
        return sum(map(factor_bytes, packs_of(program, bucket.index)))
    if node.target in (ops.updated_rows, ops.store_rows):
        return bytes_of_rows_sent(program, bucket.index)
    if node.target is ops.pack or (bucket.is_cut and node.target is ops.wait):
        return _pack_bytes(program, node)
    is_of_sum = node.target is ops.wait and launch_of(node).target in ops.REDUCTIONS
    start, stop = (bucket.share if is_of_sum else bucket.updated)(replica, program.num_replicas)
    return (stop - start) * bucket.dtype.itemsize


def _pack_bytes(program: Program, node: fx.Node) -> int:
    if node.kwargs.get("pack") is None:
        return program.buckets[bucket_of(node)].num_bytes
    bucket, pack = program.packs[pack_of(node)]
    return pack.num_elements * bucket.dtype.itemsize
