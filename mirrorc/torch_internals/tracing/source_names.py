"""Translates Dynamo's expressions to the user's words."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

_HOOKS = {"_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook"}
_HOOKS_OF_ALL = {f"_global{table}": kind for table, kind in _HOOKS.items()}
_NOT_SPOKEN_OF = (
    *("__dict__", "__func__", "__closure__", "__defaults__", "__kwdefaults__"),
    *("_parameters", "_buffers", "_modules"),
)


class SourceWords(NamedTuple):
    """The user's words for an expression.

    Attributes:
        name: the name in the user's code: ``model.blocks.0.scale``, ``acts[0]``.
        place: the scope of the name, such as ``a forward hook of module '0'``; empty for a global name.
    """

    name: str
    place: str


def source_words(expression: str, scope: Mapping[str, Any]) -> SourceWords:
    """The user's words for an expression that reads an object, or for a condition on objects.

    Args:
        scope: the namespace of the expression; none of its functions is called.
    """
    reader = _Reader(scope)
    with contextlib.suppress(SyntaxError):
        name = ast.unparse(reader.visit(ast.parse(expression.strip(), mode="eval")))
        return SourceWords(name, reader.place)
    return SourceWords(expression.strip(), "")


def in_users_words(guard: str, scope: Mapping[str, Any]) -> str:
    condition, _, comment = guard.partition("  # ")
    condition = re.sub(r"^\d+/\d+: |, type=<.*$", "", condition.strip())
    gone = re.fullmatch(r"\w+Error on (.*)", condition)  # the expression no longer evaluates
    text, place = source_words(gone[1] if gone else condition, scope)
    text += " is gone" if gone else ""
    line = re.sub(r"^.*/", "", comment.rpartition("# ")[2].partition(" (HINT: ")[0].strip())
    return f"{text}{f' in {place}' if place else ''}{f', read at {line}' if line else ''}"


class _Reader(ast.NodeTransformer):
    def __init__(self, scope: Mapping[str, Any]) -> None:
        self.place = ""
        self._scope = dict(scope)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, ast.expr) or (name := self._name(node)) is None:
            return super().generic_visit(node)
        return ast.Name(name or getattr(self._value(node), "__name__", "the step"))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called == "___dict_contains":
            return ast.Compare(self.visit(node.args[0]), [ast.In()], [self.visit(node.args[1])])
        if called == "___check_type_id":
            return ast.Name(f"type({ast.unparse(self.visit(node.args[0]))})")
        if called.startswith("___") and node.args:
            return self.visit(node.args[0])
        return self.generic_visit(node)

    def _name(self, node: ast.AST) -> str | None:
        match node:
            case ast.Subscript(ast.Name("L"), ast.Constant("self")):
                return ""
            case ast.Subscript(ast.Name("G"), ast.Constant(str(key))):
                return "" if key.startswith("__") else key
            case ast.Subscript():
                return self._item(node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call(ast.Name("type"), [owner]) if self._name(owner) is not None:
                return getattr(self._value(node), "__name__", "a class")
            case ast.Call(ast.Name("dict"), [read]):
                return self._name(read)
            case ast.Call(ast.Name("list"), [ast.Call(_, [read])]):  # the keys of a dict
                return f"keys({name})" if (name := self._name(read)) is not None else None
        return None

    def _item(self, node: ast.Subscript) -> str | None:
        match node:
            case ast.Subscript(ast.Attribute(_, "__mro__")):
                return getattr(self._value(node), "__name__", "a class")
            case ast.Subscript(ast.Attribute(owner, "_modules"), ast.Constant(key)):
                return self._member(owner, str(key))
            case ast.Subscript(ast.Attribute(owner, "plain"), ast.Constant(str(key))) if self._name(owner) == "":
                return key
            case ast.Subscript(ast.Attribute(owner, "drawn"), ast.Constant(int(key))) if self._name(owner) == "":
                return f"random_{key}"
            case ast.Subscript(ast.Attribute(owner, "__dict__"), ast.Constant(str(key))):
                return self._member(owner, key)
            case ast.Subscript(ast.Call(ast.Name("dict"), [ast.Attribute(owner, "__dict__")]), ast.Constant(str(key))):
                return self._member(owner, key)
        if self._is_hook(node):
            self._note_place(node)
            return "self"
        if (variable := self._variable(node)) is not None:
            return variable
        name = self._name(node.value)
        if name is not None and name.startswith("the hooks of "):
            return name
        if name == "" and isinstance(node.slice, ast.Constant):
            return str(node.slice.value)
        return None if name is None else f"{name}[{ast.unparse(self.visit(copy.deepcopy(node.slice)))}]"

    def _attribute(self, node: ast.Attribute) -> str | None:
        match node:
            case ast.Attribute(
                ast.Subscript(ast.Attribute(function, "__closure__"), ast.Constant(int(i))), "cell_contents"
            ):
                self._note_place(function)
                variables = _code_of(self._value(function)).co_freevars
                return str(variables[i]) if i < len(variables) else "a variable"
            case ast.Attribute(owner, "__self__"):
                self._note_place(owner)
                return "self"
            case ast.Attribute(owner, attribute) if attribute in _NOT_SPOKEN_OF:
                return self._name(owner)
            case ast.Attribute(owner, table) if "_hooks" in table and self._name(owner) is not None:
                return f"the hooks of {'all modules' if '_global' in table else self._module(owner)}"
        return self._member(node.value, node.attr)

    def _variable(self, node: ast.Subscript) -> str | None:
        match node:
            case ast.Subscript(ast.Attribute(function, "__defaults__"), ast.Constant(int(index))):
                value = self._value(function)
                code, defaults = _code_of(value), getattr(value, "__defaults__", None) or ()
                names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
            case ast.Subscript(ast.Attribute(function, "args"), ast.Constant(int(index))):
                partial = self._value(function)
                if not isinstance(partial, functools.partial):
                    return None
                names = _code_of(partial.func).co_varnames
            case ast.Subscript(ast.Attribute(function, "__kwdefaults__" | "keywords"), ast.Constant(str(key))):
                index, names = 0, (key,)
            case _:
                return None
        self._note_place(function)
        return names[index] if index < len(names) else "an argument"

    def _member(self, owner: ast.expr, key: str) -> str | None:
        name = self._name(owner)
        return None if name is None else f"{name}.{key}" if name else key

    def _is_hook(self, node: ast.AST) -> bool:
        match node:
            case ast.Subscript(ast.Attribute(_, table)):
                return table in _HOOKS
            case ast.Subscript(ast.Subscript(ast.Name("G"), ast.Constant(str(table)))):
                return table in _HOOKS_OF_ALL
        return False

    def _note_place(self, function: ast.expr) -> None:
        """Keeps the first scope, because the innermost function comes first."""
        self.place = self.place or self._place_of(function)

    def _place_of(self, function: ast.expr) -> str:
        match function:
            case ast.Subscript(ast.Attribute(owner, table)) if table in _HOOKS:
                return f"a {_HOOKS[table]} of {self._module(owner)}"
            case ast.Subscript(ast.Subscript(ast.Name("G"), ast.Constant(str(table)))) if table in _HOOKS_OF_ALL:
                return f"a {_HOOKS_OF_ALL[table]} of all modules"
            case ast.Attribute(inner, "func" | "__func__" | "__call__") if self._is_hook(inner):
                return self._place_of(inner)
        name = _Reader(self._scope)._name(function) or ""
        if name.startswith("loss_fn"):
            return "loss_fn"
        value = self._value(function)
        function_name = getattr(value, "__name__", type(value).__name__)
        return "" if function_name == "<lambda>" else f"{function_name}()"

    def _module(self, module: ast.expr) -> str:
        name = _Reader(self._scope)._name(module) or "model"
        return "the model" if name == "model" else f"module {name.removeprefix('model.')!r}"

    def _value(self, node: ast.expr) -> Any:
        with contextlib.suppress(Exception):  # the expression runs the user's code
            return eval(compile(ast.Expression(ast.fix_missing_locations(node)), "<source>", "eval"), self._scope)
        return None


def _code_of(function: Any) -> Any:
    if isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = getattr(type(function), "forward" if isinstance(function, nn.Module) else "__call__", None)
    return getattr(function, "__code__", (lambda: None).__code__)
