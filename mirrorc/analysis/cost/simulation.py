"""Simulates a step of a lowered program: when each device makes which call, and when each bucket is on its way to others.

It is a pure function of a program and of times that are given to it. It follows the order in which each device's graph makes its
calls, and what these wait for, wherever passes have put launches, waits and commits.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, is_computed, is_region_call, name_of, pack_of
from mirrorc.ir.operation import Kind, operation_of
from mirrorc.ir.program import Program

_CALLS = (Kind.CHECK, Kind.GATHER, Kind.PACK, Kind.LAUNCH, Kind.WAIT, Kind.UPDATE, Kind.WRITE)


class Durations(Protocol):
    """What the calls of a lowered program take."""

    def start_seconds(self, replica: int) -> float:
        """From the step's beginning until a device's function begins."""

    def seconds_of(self, replica: int, node: fx.Node) -> float:
        """What a device spends on a call itself: of a wait, what it does when everything it waits for is there."""

    def flight_seconds(self, node: fx.Node) -> float:
        """How long what a launch between workers sends is on its way, when all have launched it and nothing else is."""


@dataclass(frozen=True)
class SimulatedCall:
    """A call of a device. Times are seconds from the beginning of the step.

    Attributes:
        node: of the device's graph.
        start, end: when it begins and ends.
        waited: how much of it the device waits for others, or for what is on its way.
    """

    node: fx.Node
    start: float
    end: float
    waited: float = 0.0


@dataclass(frozen=True)
class Flight:
    """A bucket on its way between workers, in the lane that carries one after the other. Times as in `SimulatedCall`.

    Attributes:
        bucket: its number.
        kind: the name of the operation that launches it.
        launched: when the last device of the worker has launched it.
        begun: when the lane is free for it.
        arrived: when it is there.
    """

    bucket: int
    kind: str
    launched: float
    begun: float
    arrived: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Attributes:
        calls: of each device, in order.
        flights: in the order in which they are launched.
    """

    calls: tuple[tuple[SimulatedCall, ...], ...]
    flights: tuple[Flight, ...]

    @property
    def seconds(self) -> float:
        """The time until the last device is done."""
        return max((own[-1].end for own in self.calls if own), default=0.0)

    def exposed_seconds(self, bucket: int, kind: str) -> float:
        """How long devices are in their waits for what one kind of launch gives of a bucket, as a mean over devices."""
        waits = [
            call.end - call.start
            for own in self.calls
            for call in own
            if call.node.target is ops.wait
            and bucket_of(call.node) == bucket
            and name_of(_launch_of(call.node)) == kind
        ]
        return sum(waits) / len(self.calls)


def simulate(program: Program, durations: Durations) -> Simulation:
    """Simulates a step of a lowered program. Other workers are taken to be as fast as this one.

    Args:
        program: it is not changed.
        durations: what its calls take.

    Raises:
        ValueError: devices wait for each other in a circle, which the verifier refuses.
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
    """A simulation that runs: how far each device is."""

    def __init__(self, program: Program, durations: Durations) -> None:
        self._program, self._durations = program, durations
        graphs = [module.graph for module in program.device_graphs.values()]
        self.replicas = range(len(graphs))
        self._todo = [[node for node in graph.nodes if _is_call(node)] for graph in graphs]
        self._next = [0] * len(graphs)
        self.now = [durations.start_seconds(replica) for replica in self.replicas]
        self.calls: list[list[SimulatedCall]] = [[] for _ in graphs]
        self.flights: list[Flight] = []
        self._came: dict[Any, dict[int, float]] = {}  # when each device came to what several take part in
        self._arrived: dict[Any, float] = {}  # when a launch between workers is there
        self._free = 0.0  # when the lane between workers is

    def has_more(self, replica: int) -> bool:
        return self._next[replica] < len(self._todo[replica])

    def advance(self, replica: int) -> bool:
        """Makes a device's next call; gives False if it waits for what other devices have not done yet."""
        node = self._todo[replica][self._next[replica]]
        start = self.now[replica]
        own = self._durations.seconds_of(replica, node)
        if node.target is ops.commit:
            came = self._came.setdefault("commit", {})
            came[replica] = start
            ready = max(came.values()) if len(came) == len(self.replicas) else None
        elif node.target is ops.wait:
            ready = self._ready(replica, _launch_of(node))
        else:
            ready = start
        if ready is None:
            return False
        waited = max(0.0, ready - start)
        end = start + waited + own
        self.calls[replica].append(SimulatedCall(node, start, end, waited))
        self.now[replica] = end
        self._next[replica] += 1
        operation = operation_of(node.target)
        if operation is not None and operation.kind is Kind.LAUNCH:
            self._launch(replica, node)
        return True

    def _launch(self, replica: int, node: fx.Node) -> None:
        """Notes that a device has launched something; when all have, it is sent to the other workers."""
        came = self._came.setdefault(_tag(node, replica), {})
        came[replica] = self.now[replica]
        if node.target in ops.BETWEEN_WORKERS and len(came) == len(self.replicas):
            launched = max(came.values())
            begun = max(launched, self._free)
            self._free = begun + self._durations.flight_seconds(node)
            self._arrived[_tag(node, replica)] = self._free
            self.flights.append(Flight(bucket_of(node), name_of(node), launched, begun, self._free))

    def _ready(self, replica: int, launch: fx.Node) -> float | None:
        """When what a device has launched is there, or everyone has come who is needed; None if that is not known yet."""
        if launch.target in ops.BETWEEN_WORKERS:
            return self._arrived.get(_tag(launch, replica))
        came = self._came.get(_tag(launch, replica), {})
        giver: Any = launch.kwargs.get("root", launch.kwargs.get("source"))
        if giver is not None:
            return came.get(giver)
        return max(came.values()) if len(came) == len(self.replicas) else None


def _tag(node: fx.Node, replica: int) -> Any:
    """What the launches of one collective have alike; a `send` and its `recv` are one."""
    if node.target in (ops.send, ops.recv):
        is_sent = node.target is ops.send
        to = node.kwargs["destination"] if is_sent else replica
        source = replica if is_sent else node.kwargs["source"]
        return (
            "send",
            bucket_of(node),
            node.kwargs.get("pack"),
            node.kwargs.get("chunk", 0),
            node.kwargs.get("round", 0),
            source,
            to,
        )
    return name_of(node), pack_of(node)


def _launch_of(wait: fx.Node) -> fx.Node:
    """What a wait waits for."""
    launch = wait.args[0]
    assert isinstance(launch, fx.Node), "a wait takes what a launch gives"
    return launch


def _is_call(node: fx.Node) -> bool:
    """Whether a device spends time on a node: a region, or an operation that does something."""
    operation = operation_of(node.target)
    if node.target is operator.getitem:
        return False
    return is_region_call(node) or is_computed(node) or (operation is not None and operation.kind in _CALLS)
