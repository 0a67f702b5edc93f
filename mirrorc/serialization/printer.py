"""Writes the complete text of a program, which `mirrorc.serialization.parser` reads."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx

from mirrorc.ir.nodes import CHECKPOINT, Checkpoint
from mirrorc.ir.program import Program
from mirrorc.messages.source_lines import last_users_line
from mirrorc.printing.program_text import program_heading
from mirrorc.serialization.literals import TextError, argument_text, identifier, quoted
from mirrorc.serialization.operator_names import operator_name
from mirrorc.serialization.records import defaults, field_types, record_text
from mirrorc.serialization.type_text import TypePrinter
from mirrorc.torch_internals import SizeSymbol

VERSION = 16
"""The version of the text, for changes that older readers cannot read; tests/passes/cases then change, too."""

GRAPHS = ("shard_graphs", "graph", "device_graphs", "regions")
"""Fields of a program that are functions of its text, not tables."""

MODEL = "L['self'].model"
"""The path of the user's model in a captured module."""

_WIDTH = 120
_FACTS = re.compile(r"\{([a-z_]+=[^{}]*)\}")  # what types have in braces


def complete_text(program: Program) -> str:
    """See `Program.to_text`."""
    graphs = _GraphPrinter()
    functions = list(_functions(program, graphs))
    tables = [
        f"{name} = {record_text(getattr(program, name), kind, name)}"
        for name, kind in field_types(Program).items()
        if name not in GRAPHS and (name not in defaults(Program) or getattr(program, name) != defaults(Program)[name])
    ]
    if graphs.types.symbols:
        kind = tuple[tuple[SizeSymbol, ...], ...]
        tables.append(f"symbols = {record_text(tuple(graphs.types.symbols), kind, 'symbols')}")
    version = f"# complete form {VERSION} · mirrorc {importlib.metadata.version('mirrorc')} · torch {torch.__version__}"
    return "\n".join([program_heading(program), version, *tables, *functions]) + "\n"


def body_text(graph: fx.Graph) -> str:
    """The text of a graph that calls no regions, without places in the user's code and in memory."""
    lines = _GraphPrinter().text("", "", graph, "the graph").split("\n")
    return _FACTS.sub(_without_offset, "\n".join(line for line in lines if not line.startswith("    at(")))


def _without_offset(match: re.Match[str]) -> str:
    facts = re.sub(r"(^|, )offset=\d+", "", match[1]).removeprefix(", ")
    return f"{{{facts}}}" if facts else ""


def _functions(program: Program, graphs: _GraphPrinter) -> Iterator[str]:
    for i, graph in enumerate(program.shard_graphs):
        yield graphs.text("@shard", "def one_device", graph, f"shard graph {i}")
    if program.graph is not None:
        yield graphs.text("@mirrored", "def all_devices", program.graph, "the mirrored graph")
    for replica, (name, module) in enumerate(program.device_graphs.items()):
        decorator = f"@device({quoted(name)}{_class_of(module, f'Replica{replica}')})"
        title = "def " + re.sub(r"[^0-9A-Za-z]", "_", name)
        bodies = {name: region.graph_module for name, region in program.regions.items()}
        called = {child for child, m in module.named_children() if bodies.get(child) is m}
        yield graphs.text(decorator, title, module.graph, f"the graph of {name}", called)
    for name, region in program.regions.items():
        other = f", name={quoted(region.name)}" if region.name != name else ""
        decorator = f"@region({quoted(region.phase)}{other}{_class_of(region.graph_module, name)})"
        title = f"region {identifier(name, 'the name of a region')}"
        yield graphs.text(decorator, title, region.graph_module.graph, f"region {name}")


def _class_of(module: fx.GraphModule, default: str) -> str:
    name = identifier(type(module).__name__, "the class name of a graph")
    return f", class_name={quoted(name)}" if name != default else ""


class _GraphPrinter:
    def __init__(self) -> None:
        self.types = TypePrinter()
        self._callees: dict[Any, str] = {}
        self._lines: dict[str, str] = {}  # stack trace -> the user's line

    def text(self, decorator: str, title: str, graph: fx.Graph, where: str, regions: Collection[str] = ()) -> str:
        """A function, after an empty line. ``regions`` are the modules that it may call."""
        signature: list[str] = []
        body: list[str] = []
        position = "at()"
        seen: set[fx.Node] = set()

        def value(item: Any) -> str:
            if not isinstance(item, fx.Node):
                raise TextError(f"an argument is {item!r:.60} of type {type(item).__name__}, which cannot be saved")
            if item not in seen:
                raise TextError(f"it uses {item.name}, which comes later or is in another graph")
            return item.name

        for node in graph.nodes:
            try:
                if node.op == "placeholder":
                    signature.append(self._parameter(node, is_late=bool(body)))
                elif node.op == "output":
                    body.append(f"    return {argument_text(node.args[0], value)}")
                else:
                    line, at = self._statement(node, value, regions), self._position(node)
                    body += [f"    {at}"] if at != position else []
                    body.append(line)
                    position = at
            except TextError as error:
                raise TextError(f"node {node.name!r} of {where}: {error}") from error
            seen.add(node)
        parameters = ", ".join(signature)
        if len(title) + len(parameters) > _WIDTH:
            parameters = "".join(["\n", *(f"    {parameter},\n" for parameter in signature)])
        return "\n".join(["", decorator, f"{title}({parameters}):", *body])

    def _parameter(self, node: fx.Node, is_late: bool) -> str:
        if is_late or node.args or node.kwargs:
            raise TextError("a placeholder comes first, and has no default")
        name, target = identifier(node.name, "its name"), identifier(node.target, "its target")
        return f"{name}{self._type(node)}" + (f" = {quoted(target)}" if target != name else "")

    def _statement(self, node: fx.Node, value: Callable[[Any], str], regions: Collection[str]) -> str:
        callee = self._callee(node, regions)
        args = [argument_text(item, value) for item in node.args]
        args += [f"{identifier(key, 'a key')}={argument_text(item, value)}" for key, item in node.kwargs.items()]
        is_part = callee == "operator.getitem" and len(args) == 2 and type(node.args[1]) is int and node.args[1] >= 0
        call = f"{args[0]}[{args[1]}]" if is_part else f"{callee}({', '.join(args)})"
        return f"    {identifier(node.name, 'its name')}{self._type(node)} = {call}"

    def _type(self, node: fx.Node) -> str:
        return f": {self.types.text(node.meta['val'])}" if "val" in node.meta else ""

    def _callee(self, node: fx.Node, regions: Collection[str]) -> str:
        if node.op == "call_module":
            if node.target not in regions:
                raise TextError(f"it calls the module {node.target!r}, which is no region of the program")
            return f"region.{identifier(node.target, 'its target')}"
        if node.op != "call_function":
            raise TextError(f"programs have no {node.op}")
        if node.target not in self._callees:
            name = operator_name(node.target)
            try:
                self._callees[node.target] = ".".join(identifier(part, "") for part in name.split("."))
            except TextError:  # such as aten.random.from
                self._callees[node.target] = f"operator({quoted(name)})"
        return self._callees[node.target]

    def _position(self, node: fx.Node) -> str:
        parts = []
        trace = node.meta.get("stack_trace")
        if trace:
            if trace not in self._lines:
                self._lines[trace] = quoted(last_users_line(trace))
            parts.append(f"line={self._lines[trace]}")
        modules = list((node.meta.get("nn_module_stack") or {}).values())
        if modules:
            path, kind = modules[-1]
            class_name = getattr(kind, "__name__", str(kind).rsplit(".", 1)[-1])
            key = "module" if str(path).startswith(MODEL) else "path"
            parts += [f"{key}={quoted(str(path).removeprefix(MODEL).removeprefix('.'))}", f"type={quoted(class_name)}"]
        if CHECKPOINT in node.meta:
            parts.append(f"checkpoint={record_text(node.meta[CHECKPOINT], Checkpoint, 'its checkpoint')}")
        return f"at({', '.join(parts)})" if parts else "at()"
