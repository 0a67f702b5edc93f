"""Simulates a step of a lowered program."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, is_computed, is_region_call, launch_of, name_of, pack_of
from mirrorc.ir.operation import Kind, operation_of
from mirrorc.ir.program import Program

_CALLS = (Kind.CHECK, Kind.GATHER, Kind.PACK, Kind.LAUNCH, Kind.WAIT, Kind.UPDATE, Kind.WRITE)


class Durations(Protocol):
    def start_seconds(self, replica: int) -> float:
        """Seconds until the device's function begins."""

    def seconds_of(self, replica: int, node: fx.Node) -> float:
        """For a wait, only the work after everything has arrived."""

    def flight_seconds(self, node: fx.Node) -> float:
        """Seconds of a launch between workers, on an idle link."""


@dataclass(frozen=True)
class SimulatedCall:
    """A device's call, in seconds from the step's beginning. ``waited``: for other devices or the link."""

    node: fx.Node
    start: float
    end: float
    waited: float = 0.0


@dataclass(frozen=True)
class Flight:
    """A bucket on the link between workers, which carries one at a time. ``launched``: by the last device."""

    bucket: int
    kind: str
    launched: float
    begun: float
    arrived: float


@dataclass(frozen=True)
class Simulation:
    """``calls`` are by device, ``flights`` in launch order."""

    calls: tuple[tuple[SimulatedCall, ...], ...]
    flights: tuple[Flight, ...]

    @property
    def seconds(self) -> float:
        return max((device_calls[-1].end for device_calls in self.calls if device_calls), default=0.0)

    def exposed_seconds(self, bucket: int, kind: str) -> float:
        """Waits for a bucket's launches of one kind, as a mean over devices."""
        waits = [
            call.end - call.start
            for device_calls in self.calls
            for call in device_calls
            if call.node.target is ops.wait and bucket_of(call.node) == bucket and name_of(launch_of(call.node)) == kind
        ]
        return sum(waits) / len(self.calls)


def simulate(program: Program, durations: Durations) -> Simulation:
    """Other workers are assumed to be as fast as this one.

    Raises:
        ValueError: devices wait for each other in a cycle; the verifier refuses such programs.
    """
    run = _Run(program, durations)
    while True:
        unfinished = [replica for replica in run.replicas if run.has_more(replica)]
        if not unfinished:
            break
        for replica in sorted(unfinished, key=run.now.__getitem__):
            if run.advance(replica):
                break
        else:
            raise ValueError("the devices of this program wait for each other in a circle")
    return Simulation(tuple(map(tuple, run.calls)), tuple(run.flights))


class _Run:
    def __init__(self, program: Program, durations: Durations) -> None:
        self._program, self._durations = program, durations
        graphs = [module.graph for module in program.device_graphs.values()]
        self.replicas = range(len(graphs))
        self._todo = [[node for node in graph.nodes if _is_call(node)] for graph in graphs]
        self._next = [0] * len(graphs)
        self.now = [durations.start_seconds(replica) for replica in self.replicas]
        self.calls: list[list[SimulatedCall]] = [[] for _ in graphs]
        self.flights: list[Flight] = []
        self._came: dict[Any, dict[int, float]] = {}  # the time at which each device reached a joint operation
        self._arrived: dict[Any, float] = {}  # arrival times of launches between workers
        self._free = 0.0  # the time from which the link between workers is idle

    def has_more(self, replica: int) -> bool:
        return self._next[replica] < len(self._todo[replica])

    def advance(self, replica: int) -> bool:
        node = self._todo[replica][self._next[replica]]
        start = self.now[replica]
        duration = self._durations.seconds_of(replica, node)
        if node.target is ops.commit:
            came = self._came.setdefault("commit", {})
            came[replica] = start
            ready = max(came.values()) if len(came) == len(self.replicas) else None
        elif node.target is ops.wait:
            ready = self._ready(replica, launch_of(node))
        else:
            ready = start
        if ready is None:
            return False
        waited = max(0.0, ready - start)
        end = start + waited + duration
        self.calls[replica].append(SimulatedCall(node, start, end, waited))
        self.now[replica] = end
        self._next[replica] += 1
        operation = operation_of(node.target)
        if operation is not None and operation.kind is Kind.LAUNCH:
            self._launch(replica, node)
        return True

    def _launch(self, replica: int, node: fx.Node) -> None:
        came = self._came.setdefault(_tag(node, replica), {})
        came[replica] = self.now[replica]
        if node.target in ops.BETWEEN_WORKERS and len(came) == len(self.replicas):
            launched = max(came.values())
            begun = max(launched, self._free)
            self._free = begun + self._durations.flight_seconds(node)
            self._arrived[_tag(node, replica)] = self._free
            self.flights.append(Flight(bucket_of(node), name_of(node), launched, begun, self._free))

    def _ready(self, replica: int, launch: fx.Node) -> float | None:
        if launch.target in ops.BETWEEN_WORKERS:
            return self._arrived.get(_tag(launch, replica))
        came = self._came.get(_tag(launch, replica), {})
        giver: Any = launch.kwargs.get("root", launch.kwargs.get("source"))
        if giver is not None:
            return came.get(giver)
        return max(came.values()) if len(came) == len(self.replicas) else None


def _tag(node: fx.Node, replica: int) -> Any:
    if node.target in (ops.send, ops.recv):
        ends = (replica, node.kwargs["destination"]) if node.target is ops.send else (node.kwargs["source"], replica)
        words = (node.kwargs.get("pack"), node.kwargs.get("chunk", 0), node.kwargs.get("round", 0))
        return ("send", bucket_of(node), *words, *ends)
    return name_of(node), pack_of(node)


def _is_call(node: fx.Node) -> bool:
    operation = operation_of(node.target)
    if node.target is operator.getitem:
        return False
    return is_region_call(node) or is_computed(node) or (operation is not None and operation.kind in _CALLS)
