"""Violations, and the graphs to check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Pack
from mirrorc.ir.nodes import bucket_of, calls_to, name_of, pack_of, replica_of
from mirrorc.ir.program import Program


@dataclass(frozen=True)
class Violation:
    message: str
    node: fx.Node | None = None

    def __str__(self) -> str:
        return self.message


def scopes(program: Program) -> Iterator[tuple[Callable[[int | None], str], fx.Graph, list[int | None]]]:
    """Yields each graph with operations of the IR, its replicas, and a function that names a replica in messages."""
    if program.graph is not None:
        yield lambda replica: str(program.devices[replica or 0]), program.graph, list(range(program.num_replicas))
    for name, module in program.device_graphs.items():
        yield lambda _, name=name: name, module.graph, [None]  # type: ignore[misc]


def calls(program: Program, *targets: Callable[..., Any]) -> Iterator[tuple[Callable[[int | None], str], fx.Node]]:
    """Yields the calls of operations in `scopes`, and the function that names a replica."""
    return ((where, node) for where, graph, _ in scopes(program) for node in calls_to(graph, *targets))


def losses_of(graph: fx.Graph) -> list[fx.Node]:
    """Losses of the replicas with examples; empty in an evaluation."""
    output: Any = graph.output_node().args[0]
    return [loss for loss in (output["losses"] if isinstance(output, dict) else [output]) if loss is not None]


def say(node: fx.Node) -> str:
    pack = f", pack {node.kwargs['pack']}" if node.kwargs.get("pack") is not None else ""
    return f"{name_of(node)} of bucket {bucket_of(node)}{pack}"


def say_pack(bucket: Bucket, *packs: Pack) -> str:
    return f"bucket {bucket.index}" + "".join(f", pack {pack.number}" for pack in packs if bucket.packs)


def last_of_bucket(graph: fx.Graph, bucket: int, replica: int | None) -> fx.Node | None:
    """A replica's last node of a bucket, where a message reports a missing node."""
    last = None
    for node in graph.nodes:
        if node.kwargs.get("bucket") == bucket and (node.target in ops.COLLECTIVES or replica_of(node) == replica):
            last = node
    return last


def tag(node: fx.Node) -> tuple[str, int]:
    return name_of(node), pack_of(node)


def writes_variables(node: fx.Node) -> bool:
    return node.target in ops.WRITERS


def written_buckets(node: fx.Node) -> list[int]:
    if node.target not in ops.UPDATES:
        return []
    return [bucket_of(node)] if "bucket" in node.kwargs else list(node.kwargs["buckets"])  # type: ignore[arg-type]
