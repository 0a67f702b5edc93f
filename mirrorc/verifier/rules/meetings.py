"""Rules on meetings: where the model asks all replicas for a value, all that have examples take part alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, name_of
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.routes import replica_at
from mirrorc.printing.values import type_of
from mirrorc.verifier.rule import Order, rule
from mirrorc.verifier.rules.programs import Violation, scopes

_Meetings = dict[int, list[fx.Node]]


def tag_of_meeting(node: fx.Node) -> tuple[str, int]:
    """What tells a meeting from all others, and from collectives of buckets."""
    number: Any = node.kwargs["number"]
    return name_of(node), number


def say_meeting(node: fx.Node) -> str:
    """Names a meeting in a message."""
    name, number = tag_of_meeting(node)
    return f"{name} {number}"


@rule(since=Stage.REPLICATED, order=Order.OWNERS)
def replicas_meet_alike(program: Program) -> Iterator[Violation]:
    """All replicas that have examples meet in the same order, each time under another number, and with values of one type;
    those that are gathered may have other numbers of rows, which make up what each says, as do the rows dealt out of a sum."""
    found: _Meetings = {replica: [] for replica in program.present}
    for _, graph, _ in scopes(program):
        for node in calls_to(graph, *ops.MEETINGS):
            found.setdefault(replica_at(program, node), []).append(node)
    yield from _numbered_twice(program, found)
    if not found:
        return
    first_replica, first = next(iter(found.items()))
    names = [str(device) for device in program.devices]
    for replica, nodes in found.items():
        if len(nodes) != len(first):
            yield Violation(
                f"{names[replica]} meets the others {len(nodes)} times, and {names[first_replica]} {len(first)} times: one would "
                "wait forever",
                next(iter(reversed(nodes or first)), None),
            )
            return
    for place, node in enumerate(first):
        yield from _met_otherwise(names, {replica: nodes[place] for replica, nodes in found.items()}, node)


def _numbered_twice(program: Program, found: _Meetings) -> Iterator[Violation]:
    for replica, nodes in found.items():
        for number, times in Counter(node.kwargs["number"] for node in nodes).items():
            if times > 1:
                last = next(node for node in reversed(nodes) if node.kwargs["number"] == number)
                yield Violation(
                    f"{program.devices[replica]} meets the others {times} times under the number {number}", last
                )


def _met_otherwise(names: Sequence[str], met: dict[int, fx.Node], first: fx.Node) -> Iterator[Violation]:
    """What differs between replicas in one meeting."""
    own = next(iter(met))
    for replica, node in met.items():
        if _alike(node) != _alike(first):
            yield Violation(
                f"{names[replica]} meets the others in {say_meeting(node)} with {_said(node)}, where {names[own]} does in "
                f"{say_meeting(first)} with {_said(first)}: they would wait for each other forever, or put together what does "
                "not belong together",
                node,
            )
            return
    whole, parts = _rows(met.values())
    for node, rows in whole:
        if rows != sum(parts):
            yield Violation(
                f"{say_meeting(node)} is of {rows} rows, and the replicas have {' + '.join(map(str, parts))}", node
            )


def _value(node: fx.Node) -> Any:
    return node.all_input_nodes[0].meta["val"]


def _said(node: fx.Node) -> str:
    return " and ".join(type_of(source.meta.get("val")) for source in node.all_input_nodes)


def _alike(node: fx.Node) -> Any:
    """What must be the same on all replicas; not the rows of what is gathered, nor how many a replica gets of a sum."""
    value = _value(node)
    shape = tuple(value.shape[1:]) if node.target is ops.rows_of_replicas else tuple(value.shape)
    return tag_of_meeting(node), shape, value.dtype


def _rows(nodes: Any) -> tuple[list[tuple[fx.Node, int]], list[int]]:
    """How many rows each replica's whole has, and how many each has of its own."""
    whole: list[tuple[fx.Node, int]] = []
    parts: list[int] = []
    for node in nodes:
        if node.target is ops.rows_of_replicas:
            whole.append((node, node.kwargs["rows"]))
            parts.append(len(_value(node)))
        elif node.target is ops.own_rows_of_sum:
            whole.append((node, len(_value(node))))
            parts.append(node.kwargs["rows"])
    return whole, parts
