"""Converts graphs to JSON data and back.

All graphs of a program share six tables, in which each item occurs once::

    operators   names of what nodes call, see `mirrorc.serialization.operator_names`
    types       of tensors, see `TensorType`
    tensors     for each distinct fake tensor, the index of its type
    symbols     for each environment of symbolic sizes, its symbols, see `SizeSymbol`
    lines       of the user's source, as ``file.py:14  code``; empty for a stack trace that has none
    modules     of the user's model, as [path, class]

A graph is the ordered list of its nodes, which refer to earlier ones by index::

    node = [NAME, call, [argument ...], {KEY: argument ...}, {"val": value, "line": INDEX, "module": INDEX, "checkpoint": {...}}]
    call = INDEX                                  of the operator
         | ["placeholder", TARGET] | ["call_module", REGION] | ["output", "output"]

The form of arguments is in `mirrorc.serialization.plain_data`. A value has the same form, but [INDEX] is a tensor,
["size", TEXT, INDEX] a size of an environment, and ["pending", value] a value in flight. Missing ``meta`` entries are left out.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from mirrorc.ir.checkpoints import CHECKPOINT, Checkpoint
from mirrorc.ir.ops import Pending
from mirrorc.messages.source_lines import last_users_line
from mirrorc.serialization.environments import EnvironmentWriter, decode_size, decode_symbols
from mirrorc.serialization.operator_names import find_operator, operator_name
from mirrorc.serialization.plain_data import (
    DataError,
    decode_argument,
    encode_argument,
    entry,
    expect,
    expect_identifier,
)
from mirrorc.serialization.record_data import check_keys, decode_record, encode_record
from mirrorc.serialization.tensor_types import TensorType
from mirrorc.torch_internals import FakeTensor, FakeTensorMode, is_symbolic

_TABLES = {"operators": str, "types": dict, "tensors": int, "symbols": list, "lines": str, "modules": list}
_OTHER_OPS = ("placeholder", "call_module", "output")
_META = {"val", "line", "module", "checkpoint"}
_LINE = re.compile(r"(.*?):(\w+)(?:  (.*))?", re.DOTALL)
_NO_LINE = "(none of the user's lines)"


class GraphWriter:
    def __init__(self) -> None:
        self._tables: dict[str, dict[Any, int]] = {name: {} for name in _TABLES}
        self._tensor_types: list[int] = []
        self._environments = EnvironmentWriter()
        self._known: dict[Any, int] = {}  # the index in its table of each target, tensor (by its id) and stack trace

    def encode(self, graph: fx.Graph, where: str, regions: Collection[str] = ()) -> list[Any]:
        """Converts a graph, which may call the modules ``regions``; raises `DataError` if a node cannot be saved."""
        index_of: dict[fx.Node, int] = {}

        def refer(value: Any) -> list[int]:
            if not isinstance(value, fx.Node):
                raise DataError(f"an argument is {value!r:.60} of type {type(value).__name__}, which cannot be saved")
            if value not in index_of:
                raise DataError(f"it uses {value.name}, which comes later or is in another graph")
            return [index_of[value]]

        rows: list[Any] = []
        for node in graph.nodes:
            try:
                args = [encode_argument(item, refer) for item in node.args]
                kwargs = {key: encode_argument(item, refer) for key, item in node.kwargs.items()}
                rows.append([node.name, self._call(node, regions), args, kwargs, self._meta(node)])
            except DataError as error:
                raise DataError(f"node {node.name!r} of {where}: {error}") from error
            index_of[node] = len(index_of)
        return rows

    def tables(self) -> dict[str, Any]:
        types = [encode_record(kind, TensorType, "a type") for kind in self._tables["types"]]
        tables: dict[str, Any] = {name: list(table) for name, table in self._tables.items()}
        return tables | {
            "types": types,
            "tensors": self._tensor_types,
            "symbols": self._environments.table(),
        }

    def _call(self, node: fx.Node, regions: Collection[str]) -> Any:
        if node.op == "call_function":
            if node.target not in self._known:
                self._known[node.target] = self._number("operators", operator_name(node.target))
            return self._known[node.target]
        if node.op not in _OTHER_OPS:
            raise DataError(f"programs have no {node.op}")
        if node.op == "call_module" and node.target not in regions:
            raise DataError(f"it calls the module {node.target!r}, which is no region of the program")
        return [node.op, expect_identifier(node.target, "its target")]

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        meta: dict[str, Any] = {}
        if "val" in node.meta:
            meta["val"] = encode_argument(node.meta["val"], self._value)
        trace = node.meta.get("stack_trace")
        if trace:
            if trace not in self._known:
                self._known[trace] = self._number("lines", last_users_line(trace))
            meta["line"] = self._known[trace]
        modules = list((node.meta.get("nn_module_stack") or {}).values())
        if modules:
            path, kind = modules[-1]
            class_name = getattr(kind, "__name__", str(kind).rsplit(".", 1)[-1])
            meta["module"] = self._number("modules", (str(path), class_name))
        if CHECKPOINT in node.meta:
            meta[CHECKPOINT] = encode_record(node.meta[CHECKPOINT], Checkpoint, "its checkpoint")
        return meta

    def _value(self, value: Any) -> Any:
        if isinstance(value, Pending):
            return ["pending", encode_argument(value.value, self._value)]
        if is_symbolic(value):
            return self._environments.encode(value)
        if not isinstance(value, FakeTensor):
            raise DataError(f"its value is of type {type(value).__name__}, which cannot be saved")
        index = self._known.get(id(value))
        if index is None:
            kind = TensorType.of(value, *self._environments.of(value.fake_mode.shape_env))
            index = self._known[id(value)] = len(self._tensor_types)
            self._tensor_types.append(self._number("types", kind))
        return [index]

    def _number(self, table: str, item: Any) -> int:
        return self._tables[table].setdefault(item, len(self._tables[table]))


def _trace_of(line: str) -> str:
    if not line:
        return _NO_LINE
    parts = _LINE.fullmatch(line)
    if parts is None:
        raise DataError(f"{line!r:.60} is no line of a source file")
    return f'File "{parts[1]}", line {parts[2]}, in ?\n    {parts[3] or ""}\n'


class GraphReader:
    """Converts data to the graphs of one program. Fake tensors without symbols share one fake mode."""

    def __init__(self, tables: Any) -> None:
        check_keys(tables, _TABLES, "tables")
        for name, kind in _TABLES.items():
            for item in expect(tables[name], list, name):
                expect(item, kind, f"an entry of {name}")
        self._operators = [find_operator(name) for name in tables["operators"]]
        self._types = [decode_record(data, TensorType, f"types[{i}]") for i, data in enumerate(tables["types"])]
        self._tensor_types: list[int] = tables["tensors"]
        self._traces = [_trace_of(line) for line in tables["lines"]]
        self._modules = [_module_stack(data) for data in tables["modules"]]
        self._fake_mode = FakeTensorMode(
            allow_non_fake_inputs=True
        )  # as capture's: Inductor mixes constants with values
        self._sizes = [decode_symbols(symbols, f"symbols[{i}]") for i, symbols in enumerate(tables["symbols"])]
        self._tensors: dict[int, torch.Tensor] = {}

    def decode(self, data: Any, where: str, regions: Collection[str] = ()) -> fx.Graph:
        """Inverts `GraphWriter.encode`."""
        graph = fx.Graph()
        nodes: list[fx.Node] = []

        def resolve(reference: Any) -> fx.Node:
            if len(reference) != 1:
                raise DataError(f"{reference!r:.60} stands for no argument")
            return entry(nodes, reference[0], "earlier node")

        for row in expect(data, list, where):
            try:
                name, call, args, kwargs, meta = _row(row)
                op, target = self._target(call, regions)
                node = graph.create_node(
                    op,
                    target,
                    tuple(decode_argument(item, resolve) for item in args),
                    {expect_identifier(key, "a key"): decode_argument(item, resolve) for key, item in kwargs.items()},
                    name=name,
                )
                if node.name != name:
                    raise DataError(f"the name {name!r} is taken")
                node.meta = self._meta(meta)
            except DataError as error:
                raise DataError(f"node {len(nodes)} of {where}: {error}") from error
            nodes.append(node)
        if [node for node in nodes if node.op == "output"] != nodes[-1:] or not nodes:
            raise DataError(f"{where} does not end with its output")
        return graph

    def _target(self, call: Any, regions: Collection[str]) -> tuple[str, Any]:
        if type(call) is int:
            return "call_function", entry(self._operators, call, "operator")
        op, target = call if type(call) is list and len(call) == 2 else (None, None)
        if op not in _OTHER_OPS or (op == "call_module" and expect_identifier(target, "its target") not in regions):
            raise DataError(f"{call!r:.60} is nothing to call")
        return op, expect_identifier(target, "its target")

    def _meta(self, data: dict[str, Any]) -> dict[str, Any]:
        meta: dict[str, Any] = {}
        if not data.keys() <= _META:
            raise DataError(f"{data!r:.60} is no meta")
        if "val" in data:
            meta["val"] = decode_argument(data["val"], self._value)
        if "line" in data:
            meta["stack_trace"] = entry(self._traces, data["line"], "line")
        if "module" in data:
            meta["nn_module_stack"] = entry(self._modules, data["module"], "module")
        if CHECKPOINT in data:
            meta[CHECKPOINT] = decode_record(data[CHECKPOINT], Checkpoint, "its checkpoint")
        return meta

    def _value(self, data: list[Any]) -> Any:
        if data[:1] == ["pending"] and len(data) == 2:
            return Pending(decode_argument(data[1], self._value))
        if data[:1] == ["size"] and len(data) == 3:
            return decode_size(data[1], entry(self._sizes, data[2], "environment"))
        index: Any = data[0] if len(data) == 1 else None
        kind: TensorType = entry(self._types, entry(self._tensor_types, index, "tensor"), "type")
        if index not in self._tensors:
            saved = None if kind.symbols is None else entry(self._sizes, kind.symbols, "environment")
            try:
                self._tensors[index] = kind.make(saved.fake_mode if saved is not None else self._fake_mode, saved)
            except Exception as error:
                raise DataError(f"there is no tensor of {kind}") from error
        return self._tensors[index]


def _row(row: Any) -> tuple[str, Any, list[Any], dict[str, Any], dict[str, Any]]:
    if type(row) is not list or len(row) != 5:
        raise DataError(f"{row!r:.60} is no node")
    name, call, args, kwargs, meta = row
    expect_identifier(name, "its name")
    return name, call, expect(args, list, "args"), expect(kwargs, dict, "kwargs"), expect(meta, dict, "meta")


def _module_stack(data: list[Any]) -> dict[str, tuple[str, str]]:
    path, class_name = (expect(item, str, "a module") for item in data) if len(data) == 2 else (None, None)
    if path is None or class_name is None:
        raise DataError(f"{data!r:.60} is no module")
    return {path: (path, class_name)}
