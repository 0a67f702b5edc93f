"""Prints the lines around one node, for error messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import fx

from mirrorc.ir.nodes import is_region_call
from mirrorc.ir.program import Program
from mirrorc.messages.source_lines import source_line
from mirrorc.printing.graph_text import Line, graph_lines, rendered_line

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
    near = next((other for other in _nearest(node) if other in place_of), None)
    if near is None:
        return ""
    place = place_of[near]
    shown = range(max(0, place - _AROUND), min(len(lines), place + _AROUND + 1))
    width = max(len(lines[i].device) for i in shown)
    return "\n\n" + "\n".join(("  > " if i == place else "    ") + _shown(lines[i], width) for i in shown)


def _shown(line: Line, width: int) -> str:
    source = source_line(line.node) if is_region_call(line.node) else ""
    return rendered_line(line, width) + (f", {source}" if source else "")


def _nearest(node: fx.Node) -> Iterator[fx.Node]:
    """Searches breadth first, because `getitem` nodes, reads and slots have no printed line."""
    seen = {node: None}
    waiting = deque([node])
    while waiting:
        current = waiting.popleft()
        yield current
        new = [other for other in (*current.all_input_nodes, *current.users) if other not in seen]
        seen.update(dict.fromkeys(new))
        waiting.extend(new)
