"""Checks a program after every pass against all rules of its stage, and shows the lines around a fault."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from torch import fx

from mirrorc.errors import VerifyError
from mirrorc.ir.nodes import is_region_call, reached
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.problem import message
from mirrorc.messages.source_lines import place_of, source_line
from mirrorc.messages.wording import printable
from mirrorc.pipeline.protocol import Instrument, Pass, traits_of
from mirrorc.printing.graph_text import Line, graph_lines, rendered_line
from mirrorc.verifier.rules.dataflow import KnownFlows
from mirrorc.verifier.rules.rule import Rule, Scope, Violation, rules


def verify(
    program: Program,
    *,
    after: str = "",
    before: Program | None = None,
    checked: VerifiedGraphs | None = None,
    keeps_dataflow: bool = True,
) -> None:
    """Checks every rule of a program's stage.

    Args:
        after: name of the pass that returned the program, for the message.
        before: the program before the pass, for rules on passes.
        checked: verified graphs to skip; this program's graphs are added.
        keeps_dataflow: if False, rules about dataflow are skipped.
    """
    if checked is not None:
        checked.refresh()
        if before is not None:
            changed = Rule(input_programs_are_not_changed, scope=Scope.PASS)
            _refuse_first(program, _changed_in_place(before, checked), changed, after)
    bodies = [region.graph_module.graph for region in program.regions.values()]
    plain = program.graphs() if program.stage < Stage.OUTLINED else []  # independent of the program's tables
    graphs = [] if plain else program.graphs()
    graphs += [graph for graph in (*plain, *bodies) if checked is None or not checked.has(graph)]
    flows = checked.flows if checked is not None else KnownFlows()
    is_known = checked is not None and checked.is_last(program)  # the pass has changed nothing
    for rule in rules():
        if not rule.holds_at(program.stage) or (rule.is_about_dataflow and not keeps_dataflow):
            continue
        if is_known and rule.scope is not Scope.PASS and not rule.is_about_dataflow:
            continue
        if rule.scope is Scope.PROGRAM:
            _refuse_first(program, rule.check(program), rule, after)
        elif rule.scope is Scope.GRAPH:
            for graph in graphs:
                _refuse_first(program, rule.check(program, graph), rule, after)
        elif before is not None:
            _refuse_first(program, rule.check(before, program, flows), rule, after)
    if checked is not None:
        checked.add(program)


def input_programs_are_not_changed(program: Program) -> None:
    """A pass returns a new program, and does not change the graphs of its input; `graph_edits.copied` copies a graph."""


def _changed_in_place(before: Program, checked: VerifiedGraphs) -> Iterator[Violation]:
    if any(checked.was_changed(graph) for graph in all_graphs(before)):
        yield Violation(
            "a graph of the program that the pass was given is no longer as it was, nor is it where it is saved"
        )


def _refuse_first(program: Program, violations: Iterator[Violation], rule: Rule, after: str) -> None:
    try:
        violation = next(violations, None)
    except (LookupError, TypeError, AttributeError, ValueError, AssertionError, StopIteration, RecursionError) as error:
        violation = Violation(f"it cannot be checked, as the program is malformed ({type(error).__name__}: {error})")
    if violation is None:
        return
    by = f"pass {after!r} breaks" if after else "the program breaks"
    line = place_of(violation.node) if violation.node is not None else ""
    text = message(
        f"MC4101: {by} the rule {rule.name} {rule.when(program)}",
        f"{violation}. The rule: {rule.statement}",
        f"mend the {'pass, or the program that it was given' if after else 'program'}; Debug(dump=...) shows it after every pass",
        at=line,
        now="the program will not run",
    )
    raise VerifyError(printable(text + surroundings(program, violation.node)))


class Verify(Instrument):
    def __init__(self) -> None:
        self._checked = VerifiedGraphs()

    def start(self, program: Program) -> None:
        verify(program, checked=self._checked)

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        keeps_dataflow = not traits_of(compiler_pass).changes_dataflow
        verify(after, after=compiler_pass.name, before=before, checked=self._checked, keeps_dataflow=keeps_dataflow)


class VerifiedGraphs:
    """The graphs and dataflow of the last verified program. Most passes leave most regions unchanged."""

    def __init__(self) -> None:
        self.flows = KnownFlows()
        self._checked: dict[int, tuple[fx.Graph, list[Any]]] = {}
        self._changed: set[int] = set()
        self._last: list[Any] = []  # the contents of the last program

    def refresh(self) -> None:
        """Finds verified graphs that were changed in place; passes must return new graphs instead."""
        self._changed = {key for key, (graph, parts) in self._checked.items() if not _are_same(parts, _parts(graph))}

    def was_changed(self, graph: fx.Graph) -> bool:
        return self._is_known(graph) and id(graph) in self._changed

    def has(self, graph: fx.Graph) -> bool:
        return self._is_known(graph) and id(graph) not in self._changed

    def is_last(self, program: Program) -> bool:
        """True if a program equals the last verified one, except for remarks."""
        return _contents(program) == self._last and all(map(self.has, all_graphs(program)))

    def add(self, program: Program) -> None:
        graphs = all_graphs(program)
        parts = [self._checked[id(graph)][1] if self.has(graph) else _parts(graph) for graph in graphs]
        self._checked = {id(graph): (graph, contents) for graph, contents in zip(graphs, parts, strict=True)}
        self._changed, self._last = set(), _contents(program)

    def _is_known(self, graph: fx.Graph) -> bool:
        return id(graph) in self._checked and self._checked[id(graph)][0] is graph


def _parts(graph: fx.Graph) -> list[Any]:
    """Identities suffice: arguments are immutable, so a changed argument is a new object."""
    return [part for node in graph.nodes for part in (node, node.target, node.args, node.kwargs, node.meta.get("val"))]


def _contents(program: Program) -> list[Any]:
    values = (getattr(program, field.name) for field in fields(program) if field.name != "remarks")
    return [dict(value) if isinstance(value, Mapping) else value for value in values]  # a table may be changed in place


def _are_same(parts: list[Any], other: list[Any]) -> bool:
    return len(parts) == len(other) and all(map(operator.is_, parts, other))


def all_graphs(program: Program) -> list[fx.Graph]:
    return [*program.graphs(), *(region.graph_module.graph for region in program.regions.values())]


_AROUND = 5  # lines shown before and after one that an error is about


def surroundings(program: Program, node: fx.Node | None) -> str:
    """The printed lines around a node, as a paragraph of a message; empty without such lines."""
    graphs = [*program.graphs(), *(region.graph_module.graph for region in program.regions.values())]
    if node is None or not any(node.graph is graph for graph in graphs):
        return ""
    try:
        lines = graph_lines(program, node.graph)
    except (LookupError, TypeError, AttributeError, ValueError, AssertionError):  # too broken to be printed
        return ""
    place_of = {line.node: i for i, line in enumerate(lines)}
    # `getitem` nodes, reads and slots have no printed line
    nearest = reached([node], lambda other: (*other.all_input_nodes, *other.users))
    near = next((other for other in nearest if other in place_of), None)
    if near is None:
        return ""
    place = place_of[near]
    shown = range(max(0, place - _AROUND), min(len(lines), place + _AROUND + 1))
    width = max(len(lines[i].device) for i in shown)
    return "\n\n" + "\n".join(("  > " if i == place else "    ") + _shown(lines[i], width) for i in shown)


def _shown(line: Line, width: int) -> str:
    source = source_line(line.node) if is_region_call(line.node) else ""
    return rendered_line(line, width) + (f", {source}" if source else "")
