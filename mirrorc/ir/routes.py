"""Tags that match each send with its receive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import fx

from mirrorc.ir.nodes import bucket_of, replica_of
from mirrorc.ir.operation import Effect, Selection
from mirrorc.ir.program import Program

_SENDS = Selection(lambda record: Effect.SENDS in record.effects)


class Route(NamedTuple):
    """The tag of a send, unique in a program.

    Attributes:
        round: distinguishes sends of a chunk between the same two replicas.
        pack: set if buckets are cut.
    """

    bucket: int
    source: int
    destination: int
    chunk: int = 0
    round: int = 0
    pack: int | None = None

    def __str__(self) -> str:
        part = "".join(f", {name} {value}" for name, value in (("chunk", self.chunk), ("round", self.round)) if value)
        pack = f", pack {self.pack}" if self.pack is not None else ""
        return f"bucket {self.bucket}{pack}{part}"


def replica_of_graph(program: Program, graph: fx.Graph) -> int:
    """The replica of a device's graph; -1 for a graph of several devices."""
    return next((i for i, module in enumerate(program.device_graphs.values()) if module.graph is graph), -1)


def replica_at(program: Program, node: fx.Node) -> int:
    replica = replica_of(node)
    return replica_of_graph(program, node.graph) if replica is None else replica


def route_of(program: Program, node: fx.Node) -> Route:
    place, keywords = replica_at(program, node), node.kwargs
    ends: tuple[Any, Any] = (place, keywords["destination"]) if node.target in _SENDS else (keywords["source"], place)
    chunk, pack = keywords.get("chunk", 0), keywords.get("pack")
    return Route(bucket_of(node), *ends, chunk=chunk, round=keywords.get("round", 0), pack=pack)  # type: ignore[arg-type]


def send_to(program: Program, receipt: fx.Node) -> fx.Node | None:
    route = route_of(program, receipt)
    graph, graphs = receipt.graph, [module.graph for module in program.device_graphs.values()]
    if graphs:
        if not 0 <= route.source < len(graphs):
            return None
        graph = graphs[route.source]
    sends = sends_in(graph)
    return next((n for n in sends if n.kwargs["bucket"] == route.bucket and route_of(program, n) == route), None)


def sends_in(graph: fx.Graph) -> Iterator[fx.Node]:
    for send in _SENDS:
        yield from graph.find_nodes(op="call_function", target=send, sort=False)
