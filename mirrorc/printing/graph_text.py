"""Prints the lines of one graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import (
    calls_to,
    is_compute,
    is_region_call,
    name_of,
    part_keywords,
    region_of,
    region_title,
    replica_of,
    target_name,
)
from mirrorc.ir.operation import Printed, Selection, operation_of
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.source_lines import source_line
from mirrorc.printing.bucket_names import BucketNames
from mirrorc.printing.line_comments import LineComments, explanations, owner_of
from mirrorc.printing.printed_values import PrintedValues, dtype_name, type_of

RESULT_WIDTH = 32


_COMMENT_COLUMN = 92


@dataclass(frozen=True)
class Line:
    """A printed line of a graph. ``device`` may be ``all``. Explanations ``above`` it are separate lines."""

    text: str
    node: fx.Node
    comment: str = ""
    source: str = ""
    device: str = ""
    above: tuple[str, ...] = ()


def graph_lines(program: Program, graph: fx.Graph, bucket_names: BucketNames | None = None) -> list[Line]:
    """Lines of calls for a program's own graphs from OUTLINED on. Lines of operators for other graphs."""
    is_call_graph = program.stage >= Stage.OUTLINED and any(graph is other for other in program.graphs())
    return _calls(program, graph, bucket_names) if is_call_graph else statements(graph)


def rendered(lines: Iterable[Line], sources: bool) -> list[str]:
    lines = list(lines)
    width = max((len(line.device) for line in lines), default=0)
    printed, last_source = [], ""
    for line in lines:
        printed += [f"    # -- {explanation}" for explanation in line.above]
        if sources and line.source and line.source != last_source:
            printed.append(f"    # {line.source}")
            last_source = line.source
        printed.append("    " + rendered_line(line, width))
    return printed


def rendered_line(line: Line, width: int = 0) -> str:
    text = f"{line.device:<{width}} | {line.text}" if line.device else line.text
    return f"{text:<{_COMMENT_COLUMN - 4}}  # {line.comment}" if line.comment else text


def _calls(program: Program, graph: fx.Graph, bucket_names: BucketNames | None) -> list[Line]:
    values = PrintedValues(program, graph, bucket_names)
    together = _joined_texts(values, graph)
    above = explanations(program, graph)
    comments = LineComments(program)
    lines = []
    for node in graph.nodes:
        operation = operation_of(node.target)
        if node.target is operator.getitem or (operation is not None and operation.printed is Printed.WHERE_USED):
            continue
        is_joined = operation is not None and operation.printed is Printed.TOGETHER
        text = together.get(node) if is_joined else _call_text(values, node)
        if text is not None:
            device = owner_of(program, node) if graph is program.graph else ""
            lines.append(Line(text, node, comments.of(node), device=device, above=tuple(above.get(node, ()))))
    output = graph.output_node()
    returned: Any = output.args[0]
    results = ["loss"] if isinstance(returned, fx.Node) else list(returned or ())
    left_out = () if program.has_loss else ("loss", "losses") if program.trains else ("loss", "losses", "gradients")
    lines.append(Line(f"return {', '.join(name for name in results if name not in left_out) or None}", output))
    return lines


_TOGETHER = Selection(lambda operation: operation.printed is Printed.TOGETHER)


def _joined_texts(values: PrintedValues, graph: fx.Graph) -> dict[fx.Node, str]:
    joined: dict[tuple[int | None, str], list[fx.Node]] = {}
    for node in calls_to(graph, *_TOGETHER):
        joined.setdefault((replica_of(node), name_of(node)), []).append(node)
    return {
        nodes[0]: f"{name}({values.listing(source for node in nodes for source in node.all_input_nodes)})"
        for (_, name), nodes in joined.items()
    }


def _call_text(values: PrintedValues, node: fx.Node) -> str | None:
    if is_region_call(node):
        parts = sorted(node.users, key=lambda user: user.args[1])  # type: ignore[arg-type, return-value]
        results = values.listing(parts, typed=True)
        return f"{results or '_':<{RESULT_WIDTH}} = {region_title(region_of(node))}({values.listing(node.all_input_nodes)})"
    if is_compute(node):
        return f"{values.typed(node):<{RESULT_WIDTH}} = {node.target}({_shown_arguments(node, values.name)})"
    operation = operation_of(node.target)
    if node.op != "call_function":
        return None
    if operation is None:  # not in a valid program; printed to show what is wrong
        return f"{node.name:<{RESULT_WIDTH}} = {name_of(node)}({_shown_arguments(node, values.name)})"
    arguments = values.listing(node.all_input_nodes)
    if node.target in ops.FACTORED:
        arguments = values.factors(node)
    if node.target in ops.COLLECTIVES:
        number = len(node.all_input_nodes)
        of_all = f" of {number} replicas" if number > 1 else ""
        arguments = ", ".join(name + of_all for name in dict.fromkeys(map(values.name, node.all_input_nodes)))
    details = [f"bucket={node.kwargs['bucket']}"] if "bucket" in node.kwargs else []
    details += [arguments] if arguments else []
    details += [f"{key}={node.kwargs[key]}" for key in operation.shown if node.kwargs.get(key) is not None]
    text = f"{name_of(node)}({', '.join(details)})"
    parts = [user for user in node.users if part_keywords(user.target, user.args) is not None]
    results = ", ".join(values.typed(part) for part in parts) or values.typed(node)
    return f"{results:<{RESULT_WIDTH}} = {text}" if node.users else text


def statements(graph: fx.Graph, names: Mapping[str, str] = MappingProxyType({})) -> list[Line]:
    """The lines of a graph of operators."""

    def name(node: fx.Node) -> str:
        if node.op == "placeholder":
            return names.get(str(node.target), str(node.target))  # as in the signature
        return str(node.kwargs["variable"]) if node.target is ops.read else node.name

    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(Line(f"return {_shown(node.args[0], name)}", node))
        elif node.op == "call_function" and node.target is not ops.read:
            target = target_name(node.target)
            kind = type_of(node.meta.get("val"))
            result = f"{node.name}: {kind} = " if kind else ""
            source = source_line(node) if is_compute(node) else ""
            lines.append(Line(f"{result}{target}({_shown_arguments(node, name)})", node, source=source))
    return lines


def _shown_arguments(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    return ", ".join(
        [*(_shown(a, name) for a in node.args), *(f"{k}={_shown(v, name)}" for k, v in node.kwargs.items())]
    )


def _shown(argument: Any, name: Callable[[fx.Node], str]) -> str:
    if isinstance(argument, fx.Node):
        return name(argument)
    if isinstance(argument, list | tuple):
        return f"[{', '.join(_shown(item, name) for item in argument)}]"
    if isinstance(argument, dict):
        return f"{{{', '.join(f'{key}: {_shown(item, name)}' for key, item in argument.items())}}}"
    if isinstance(argument, torch.dtype):
        return dtype_name(argument)
    return str(argument) if isinstance(argument, torch.device) else repr(argument)
