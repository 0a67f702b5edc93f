"""Rules on collectives of the model, such as `mirrorc.all_reduce`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.analysis.communication.worker_meetings import worker_meetings
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, name_of
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.routes import replica_at
from mirrorc.printing.printed_values import type_of
from mirrorc.verifier.rules.rule import Order, Scope, Violation, calls, rule, scopes

_Meetings = dict[int, list[fx.Node]]


def tag_of_meeting(node: fx.Node) -> tuple[str, int]:
    number: Any = node.kwargs["number"]
    return name_of(node), number


def say_meeting(node: fx.Node) -> str:
    name, number = tag_of_meeting(node)
    return f"{name} {number}"


@rule(since=Stage.REPLICATED, order=Order.OWNERS)
def replicas_meet_alike(program: Program) -> Iterator[Violation]:
    """All replicas with examples run the same collectives of the model in the same order, with distinct numbers and
    with values of one type. Gathered values may differ in their numbers of rows, which add up to the total in the
    operation.
    """
    meetings: _Meetings = {replica: [] for replica in program.present}
    for _, node in calls(program, *ops.MEETINGS):
        meetings.setdefault(replica_at(program, node), []).append(node)
    yield from _numbered_twice(program, meetings)
    if not meetings:
        return
    first_replica, first = next(iter(meetings.items()))
    names = [str(device) for device in program.devices]
    for replica, nodes in meetings.items():
        if len(nodes) != len(first):
            yield Violation(
                f"{names[replica]} meets the others {len(nodes)} times, and {names[first_replica]} {len(first)} times: one would "
                "wait forever",
                next(iter(reversed(nodes or first)), None),
            )
            return
    for place, node in enumerate(first):
        yield from _met_otherwise(program, names, {replica: nodes[place] for replica, nodes in meetings.items()}, node)


@rule(since=Stage.REPLICATED, order=Order.OWNERS)
def workers_without_examples_attend(program: Program) -> Iterator[Violation]:
    """Only a worker without examples has `attend`: in a training step, on its first device, once for each number."""
    numbers: Counter[object] = Counter()
    for where, node in calls(program, ops.attend):
        replica = replica_at(program, node)
        numbers[node.kwargs["number"]] += 1
        if program.present or not program.meets_workers:
            why = "whose replicas meet by themselves" if program.present else "which meets no other worker"
            yield Violation(f"{node.name} attends a meeting in a program {why}", node)
        elif replica or numbers[node.kwargs["number"]] > 1:
            act = f"attends meeting {node.kwargs['number']}"
            again = "a second time" if not replica else "besides the first device"
            yield Violation(f"{where(replica)} {act} {again}", node)


@rule(since=Stage.SCHEDULED)
def workers_meet_before_they_wait(program: Program) -> Iterator[Violation]:
    """If the model has collectives over all workers, no device waits for other workers before the last of them, so that
    no two workers deadlock.
    """
    if not program.meets_workers:
        return
    for where, graph, _ in scopes(program):
        waiting: dict[int, fx.Node] = {}
        for node in graph.nodes:
            if node.target is ops.wait and node.all_input_nodes[0].target in ops.BETWEEN_WORKERS:
                waiting.setdefault(replica_at(program, node), node)
            elif node.target in ops.ATTENDED and (wait := waiting.get(replica_at(program, node))) is not None:
                yield Violation(
                    f"{where(replica_at(program, node))} waits for other workers in {wait.name} before it meets them in "
                    f"{node.name}: they may launch what it waits for behind that meeting",
                    node,
                )


@rule(scope=Scope.PASS, order=Order.REFERENCES)
def meetings_of_workers_are_preserved(before: Program, after: Program, known: object = None) -> Iterator[Violation]:
    """A pass keeps the model's collectives over workers, and their order, because all workers wait in them. A worker
    without examples attends the collectives of the graph that stands in.
    """
    expected, actual = _met_with_workers(before), _met_with_workers(after)
    if expected != actual:
        texts = [", ".join(f"{name} {number}" for number, name in met) or "none" for met in (expected, actual)]
        yield Violation(
            f"this worker met the others in {texts[0]} before the pass, and meets them in {texts[1]} behind it"
        )


def _met_with_workers(program: Program) -> list[tuple[int, str]]:
    if program.shard_graphs and program.meets_workers:
        graph = program.shard_graphs[program.shard_of_replica[program.first_present] or 0]
        return [tag_of_meeting(node)[::-1] for node in calls_to(graph, *ops.MEETINGS)]
    return [(meeting.number, meeting.name) for meeting in worker_meetings(program)]


def _numbered_twice(program: Program, meetings: _Meetings) -> Iterator[Violation]:
    for replica, nodes in meetings.items():
        for number, times in Counter(node.kwargs["number"] for node in nodes).items():
            if times > 1:
                last = next(node for node in reversed(nodes) if node.kwargs["number"] == number)
                yield Violation(
                    f"{program.devices[replica]} meets the others {times} times under the number {number}", last
                )


def _met_otherwise(program: Program, names: list[str], met: dict[int, fx.Node], first: fx.Node) -> Iterator[Violation]:
    first_replica = next(iter(met))
    for replica, node in met.items():
        if _alike(node) != _alike(first):
            yield Violation(
                f"{names[replica]} meets the others in {say_meeting(node)} with {_operand_types(node)}, where "
                f"{names[first_replica]} does in {say_meeting(first)} with {_operand_types(first)}: they would wait for each "
                "other forever, or put together what does not belong together",
                node,
            )
            return
    whole, parts = _rows(met.values())
    places = {int(str(node.kwargs.get("before", 0))) for node in met.values()}
    if len(places) > 1:
        yield Violation(
            f"{say_meeting(first)} is behind {' and '.join(map(str, sorted(places)))} rows of other workers", first
        )
        return
    before = places.pop()
    behind_is_open = program.meets_workers and program.workers.rank < program.workers.num_workers - 1
    for node, rows in whole:
        known = before + sum(parts)
        is_right = known <= rows if behind_is_open else known == rows
        if not is_right or (before and not (program.meets_workers and program.workers.rank)):
            others = f", behind {before} of other workers" if before else ""
            yield Violation(
                f"{say_meeting(node)} is of {rows} rows, and the replicas have {' + '.join(map(str, parts))}{others}",
                node,
            )


def _value(node: fx.Node) -> Any:
    return node.all_input_nodes[0].meta["val"]


def _operand_types(node: fx.Node) -> str:
    return " and ".join(type_of(source.meta.get("val")) for source in node.all_input_nodes)


def _alike(node: fx.Node) -> Any:
    value = _value(node)
    shape = tuple(value.shape[1:]) if node.target is ops.rows_of_replicas else tuple(value.shape)
    return tag_of_meeting(node), shape, value.dtype


def _rows(nodes: Any) -> tuple[list[tuple[fx.Node, int]], list[int]]:
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
