"""Reads the complete text of a program. Nothing in it is run: operators are found by name, values are fake tensors.

::

    text      = "# mirrorc · ..." "# complete form VERSION · mirrorc VERSION · torch VERSION" ( table | function )*
    table     = FIELD "=" record                            a field of `mirrorc.ir.program.Program`, or "symbols"
    function  = "@shard" | "@mirrored" | "@device(NAME)" | "@region(PHASE)", then
                ( "def" | "region" ) NAME "(" ( NAME ":" TYPE [ "=" TARGET ], ... )* "):" statement* "    return" argument
    statement = NAME [ ":" TYPE ] "=" callee "(" argument, ... ")" | NAME [ ":" TYPE ] "=" NAME "[" INDEX "]"
              | "at(" [ "line=" ... ] [ "module=" ... "type=" ... ] [ "checkpoint=" ... ] ")"    holds for the statements after it
    callee    = OPERATION | OPERATOR | "seeded." OPERATOR | "region." NAME | "operator(" STRING ")"

Records, arguments and callees are Python expressions; see the modules `records`, `literals` and `type_text`. Lines that
begin with ``#`` are comments.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from mirrorc.ir.graph_edits import collector_paused
from mirrorc.ir.nodes import CHECKPOINT, Checkpoint
from mirrorc.ir.program import Program, Region
from mirrorc.messages.source_lines import LINE_OF_TEXT
from mirrorc.serialization.literals import TextError, argument_of, assignment, expression, identifier, keywords_of
from mirrorc.serialization.operator_names import find_operator
from mirrorc.serialization.printer import GRAPHS, MODEL
from mirrorc.serialization.records import field_types, record_of
from mirrorc.serialization.type_text import TypeReader, split_at_commas
from mirrorc.torch_internals import SizeSymbol, add_node, lazy_graph_module

_INDENT = "    "
_OPENING = re.compile(r"(def|region) ([A-Za-z_]\w*)\((.*)")
_PARAMETER = re.compile(r'([A-Za-z_]\w*)(?:: (.+?))?(?: = (".+"))?')
_STATEMENT = re.compile(r"([A-Za-z_]\w*)(?:: (.+?))? = (.+)")
_LINE = re.compile(r"(.*?):(\w+)(?:  (.*))?", re.DOTALL)
_NO_LINE = "(none of the user's lines)"
_KINDS = {"shard": 0, "mirrored": 0, "device": 1, "region": 1}  # the number of arguments of each decorator


@dataclass
class _Function:
    number: int
    kind: str
    label: str
    options: dict[str, str]
    name: str = ""
    parameters: list[tuple[int, str]] = field(default_factory=list)
    body: list[tuple[int, str]] = field(default_factory=list)


@collector_paused()
def parse_program(text: str) -> Program:
    """Reads a program from its complete text, whose first lines are checked already."""
    tables: dict[str, ast.expr] = {}
    functions: list[_Function] = []
    lines = _Cursor(["" if line.lstrip().startswith("#") else line for line in text.split("\n")])
    while (line := lines.next()) is not None:
        if line.startswith("@"):
            functions.append(_function(lines, line))
        elif line:
            name, value = _table(lines, line)
            if name in tables:
                raise TextError(f"there are two tables {name}", line=lines.number)
            tables[name] = value
    return _program(tables, functions)


class _Cursor:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self.number = 0

    def next(self) -> str | None:
        self.number += 1
        return self._lines[self.number - 1] if self.number <= len(self._lines) else None

    def while_inside(self) -> Iterator[str]:
        """The following lines that are empty, indented or only close brackets."""
        while self.number < len(self._lines) and self._lines[self.number][:1] in ("", " ", ")", "]", "}"):
            self.number += 1
            yield self._lines[self.number - 1]


def _table(lines: _Cursor, line: str) -> tuple[str, ast.expr]:
    number = lines.number
    try:
        name, value = assignment("\n".join([line, *lines.while_inside()]))
    except TextError as error:
        raise error.at(number) from None
    ast.increment_lineno(value, number - 1)
    return name, value


def _function(lines: _Cursor, line: str) -> _Function:
    number = lines.number
    try:
        function = _decorated(number, expression(line[1:]))
    except TextError as error:
        raise error.at(number, 1) from None
    opening = _OPENING.fullmatch(next((other for other in iter(lines.next, None) if other), ""))
    if opening is None or (opening[1] == "region") != (function.kind == "region"):
        expected = "region" if function.kind == "region" else "def"
        raise TextError(f"behind @{function.kind} comes '{expected} NAME(NAME: TYPE, ...):'", line=number + 1)
    function.name = opening[2]
    inside = lines.while_inside()
    if opening[3]:
        if not opening[3].endswith("):"):
            raise TextError("the line ends with '):'", line=lines.number, column=len(opening[0]))
        function.parameters = [(lines.number, part) for part in split_at_commas(opening[3][:-2])]
    else:
        for parameter in inside:
            if parameter == "):":
                break
            if not parameter:
                continue
            function.parameters.append((lines.number, parameter.strip().removesuffix(",")))
    for statement in inside:
        if statement and not statement.startswith(_INDENT):
            raise TextError("a statement is four columns in", line=lines.number)
        if statement:
            function.body.append((lines.number, statement.removeprefix(_INDENT)))
    return function


def _decorated(number: int, node: ast.expr) -> _Function:
    call = node if isinstance(node, ast.Call) else ast.Call(func=node, args=[], keywords=[])
    kind = call.func.id if isinstance(call.func, ast.Name) else ""
    if kind not in _KINDS or len(call.args) != _KINDS[kind]:
        raise TextError("here stands @shard, @mirrored, @device(NAME) or @region(PHASE)", node)
    label = str(record_of(call.args[0], str, "its name")) if call.args else ""
    options = {name: record_of(value, str, name) for name, value in keywords_of(call).items()}
    if not options.keys() <= {"name", "class_name"}:
        raise TextError("there are only name= and class_name=", node)
    return _Function(number, kind, label, options)


def _program(tables: Mapping[str, ast.expr], functions: Collection[_Function]) -> Program:
    kinds = {name: kind for name, kind in field_types(Program).items() if name not in GRAPHS}
    known = kinds | {"symbols": tuple[tuple[SizeSymbol, ...], ...]}
    fields = {}
    for name, node in tables.items():
        if name not in known:
            raise TextError(f"a program has no table {name}, only {', '.join(known)}", node).at(1)
        try:
            fields[name] = record_of(node, known[name], name)
        except TextError as error:
            raise error.at(1) from None
    missing = [name for name in ("stage", "devices", "variables", "arguments") if name not in fields]
    if missing:
        raise TextError(f"there is no table {missing[0]}", line=1)
    types = TypeReader(fields.pop("symbols", ()))
    targets: dict[str, Any] = {}
    regions: dict[str, Region] = {}
    shards: list[fx.Graph] = []
    devices: dict[str, fx.GraphModule] = {}
    mirrored: fx.Graph | None = None
    seen: set[tuple[str, str]] = set()
    for function in sorted(functions, key=lambda function: function.kind != "region"):
        key = {"region": function.name, "device": function.label, "shard": str(len(shards))}.get(function.kind, "")
        if (function.kind, key) in seen:
            raise TextError(f"there are two of @{function.kind} {key}".rstrip(), line=function.number)
        seen.add((function.kind, key))
        graph = _GraphReader(types, targets, regions if function.kind == "device" else {}).read(function)
        if function.kind == "region":
            regions[key] = Region(function.options.get("name", key), function.label, _module(function, graph, {}, key))
        elif function.kind == "device":
            devices[key] = _module(function, graph, regions, f"Replica{len(devices)}")
        elif function.kind == "shard":
            shards.append(graph)
        else:
            mirrored = graph
    return Program(**fields, regions=regions, shard_graphs=tuple(shards), graph=mirrored, device_graphs=devices)


def _module(function: _Function, graph: fx.Graph, regions: Mapping[str, Region], class_name: str) -> fx.GraphModule:
    root = nn.Module()
    for node in graph.nodes:
        if node.op == "call_module":
            root.add_module(str(node.target), regions[str(node.target)].graph_module)
    try:
        class_name = identifier(function.options.get("class_name", class_name), "class_name")
        return lazy_graph_module(root, graph, class_name)
    except Exception as error:  # torch.fx turns the graph into Python code, which these nodes may not give
        reason = error if isinstance(error, TextError) else f"{type(error).__name__}: {error}"
        raise TextError(f"{function.name} makes no module ({reason})", line=function.number) from error


class _GraphReader:
    def __init__(self, types: TypeReader, targets: dict[str, Any], regions: Collection[str]) -> None:
        self._types, self._targets, self._regions = types, targets, regions
        self._graph = fx.Graph()
        self._nodes: dict[str, fx.Node] = {}
        self._position: dict[str, Any] = {}
        self._column = 0  # where the expression begins that is read at present
        self._is_done = False

    def read(self, function: _Function) -> fx.Graph:
        self._types.begin_function()
        for read, lines in ((self._parameter, function.parameters), (self._statement, function.body)):
            for number, text in lines:
                self._column = len(_INDENT)
                try:
                    read(text, number)
                except TextError as error:
                    raise error.at(number, self._column) from None
        if not self._is_done:
            raise TextError(f"{function.name} does not end with its return", line=function.number)
        return self._graph

    def _parameter(self, text: str, number: int) -> None:
        match = _PARAMETER.fullmatch(text)
        if match is None:
            raise TextError("a parameter is NAME: TYPE")
        name, kind, target = match.groups()
        target = record_of(expression(target), str, "its target") if target else name
        node = self._add(number, name, "placeholder", identifier(target, "its target"), (), {})
        self._set_type(node, kind, 0)

    def _statement(self, text: str, number: int) -> None:
        if self._is_done:
            raise TextError("nothing comes behind the return")
        if text.startswith("return "):
            result = argument_of(self._inside(text, len("return ")), self._value)
            self._add(number, "output", "output", "output", (result,), {})
            self._is_done = True
        elif text.startswith("at("):
            self._position = _position(expression(text))
        else:
            match = _STATEMENT.fullmatch(text)
            if match is None:
                raise TextError("a statement is NAME: TYPE = OPERATION(ARGUMENT, ...)")
            call = self._call(self._inside(text, match.start(3)))
            self._column = len(_INDENT)
            node = self._add(number, match[1], *call)
            node.meta.update(self._position)
            self._set_type(node, match[2], match.start(2))

    def _add(self, number: int, name: str, op: str, target: Any, args: Any, kwargs: dict[str, Any]) -> fx.Node:
        node = add_node(self._graph, op, target, args, kwargs, identifier(name, "its name"))
        if node.name != name:
            raise TextError(f"the name {name} is taken")
        node.meta[LINE_OF_TEXT] = number
        self._nodes[name] = node
        return node

    def _set_type(self, node: fx.Node, kind: str | None, start: int) -> None:
        self._column = len(_INDENT) + start
        if kind is not None:
            node.meta["val"] = self._types.value(kind)

    def _inside(self, text: str, start: int) -> ast.expr:
        self._column = len(_INDENT) + start
        return expression(text[start:])

    def _value(self, node: ast.expr) -> fx.Node:
        if not isinstance(node, ast.Name):
            raise TextError(f"{ast.unparse(node):.60} stands for no argument", node)
        if node.id not in self._nodes:
            raise TextError(f"no line above gives {node.id}", node)
        return self._nodes[node.id]

    def _call(self, node: ast.expr) -> tuple[str, Any, tuple[Any, ...], dict[str, Any]]:
        if isinstance(node, ast.Subscript):
            args = argument_of(node.value, self._value), argument_of(node.slice, self._value)
            return "call_function", operator.getitem, args, {}
        if not isinstance(node, ast.Call):
            raise TextError("here comes a call, OPERATION(ARGUMENT, ...)", node)
        args = tuple([argument_of(argument, self._value) for argument in node.args])
        named = keywords_of(node)
        kwargs = {identifier(key, "a keyword"): argument_of(part, self._value) for key, part in named.items()}
        callee = _dotted(node.func)
        region = callee.removeprefix("region.")
        if region != callee:
            if region not in self._regions:
                why = f"there is no region {region}" if self._regions else "only the graphs of devices call regions so"
                raise TextError(why, node)
            return "call_module", region, args, kwargs
        if callee not in self._targets:
            self._targets[callee] = find_operator(callee)
        return "call_function", self._targets[callee], args, kwargs


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Call(func=ast.Name(id="operator"), args=[name]):
            return str(record_of(name, str, "an operator's name"))
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise TextError("here stands the name of an operation", node)
    return ".".join([node.id, *reversed(parts)])


def _position(node: ast.expr) -> dict[str, Any]:
    given = keywords_of(node) if isinstance(node, ast.Call) and not node.args else {"": node}
    is_module = ("module" in given or "path" in given) == ("type" in given)
    if not given.keys() <= {"line", "module", "path", "type", "checkpoint"} or not is_module:
        raise TextError("here stands at(line=..., module=..., type=..., checkpoint=...)", node)
    meta: dict[str, Any] = {}
    if "line" in given:
        meta["stack_trace"] = _trace_of(record_of(given["line"], str, "line"), given["line"])
    if "type" in given:
        class_name = record_of(given["type"], str, "type")
        inside = record_of(given["module"], str, "module") if "module" in given else ""
        path = record_of(given["path"], str, "path") if "path" in given else f"{MODEL}.{inside}".removesuffix(".")
        meta["nn_module_stack"] = {path: (path, class_name)}
    if "checkpoint" in given:
        meta[CHECKPOINT] = record_of(given["checkpoint"], Checkpoint, "checkpoint")
    return meta


def _trace_of(line: str, node: ast.expr) -> str:
    if not line:
        return _NO_LINE
    parts = _LINE.fullmatch(line)
    if parts is None:
        raise TextError(f"{line!r:.60} is no line of a source file", node)
    return f'File "{parts[1]}", line {parts[2]}, in ?\n    {parts[3] or ""}\n'
