"""What rules look at: the graphs of a program, and how to name a place in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from mirrorc import ops
from mirrorc.program import Program
from mirrorc.source_lines import source_line


def scopes(program: Program) -> Iterator[tuple[Callable[[int | None], str], fx.Graph, list[int | None]]]:
    """Graphs that hold operations of the IR, each with the replicas in it and a way to name them."""
    if program.graph is not None:
        yield lambda replica: str(program.devices[replica or 0]), program.graph, list(range(program.num_replicas))
    for name, module in program.device_graphs.items():
        yield lambda _, name=name: name, module.graph, [None]  # type: ignore[misc]


def say(node: fx.Node) -> str:
    """A collective, for a message."""
    return f"{ops.name_of(node)} of bucket {ops.bucket_of(node)}"


def at(node: fx.Node) -> str:
    """Where a node comes from, for a message; empty if unknown."""
    line = source_line(node)
    return f" (at {line})" if line else ""


def tag(node: fx.Node) -> tuple[str, int]:
    """What a collective is known by: its kind and its bucket."""
    return ops.name_of(node), ops.bucket_of(node)


def place_of(program: Program, graph: fx.Graph) -> int:
    """The replica that a lowered graph is for: its place among the devices."""
    return next(i for i, module in enumerate(program.device_graphs.values()) if module.graph is graph)
