"""Pipelines as text: ``plan-buckets{buckets=5.0},outline-regions``, for the command line."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import math
import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mirrorc.messages.problem import problem
from mirrorc.messages.wording import guess
from mirrorc.packing import PLANS
from mirrorc.pipeline.protocol import Pass

_NAME = re.compile(r"\s*(?P<name>[\w.:-]+)\s*")
_SEPARATOR = re.compile(r"\s*(?:,|$)")
_STRING_OR_CHARACTER = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|.""", re.DOTALL)
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)  # their values are written as torch.float16


def format_passes(passes: Sequence[Pass]) -> str:
    """A pipeline as text for `parse_passes`, without default values. A pass from outside mirrorc is ``module:Class``."""
    return ",".join(_format(compiler_pass) for compiler_pass in passes)


def _format(compiler_pass: Pass) -> str:
    kind = type(compiler_pass)
    try:
        name = compiler_pass.name if kind.__module__.startswith("mirrorc.passes.") else _class_name(kind)
        options = dict(_options_of(compiler_pass))
        _check_made_again(compiler_pass, options)
    except Exception as error:  # of the user's, too: values may not even be comparable
        raise ValueError(f"MC4004: the pass {compiler_pass.name!r} cannot be written as text: {error}") from error
    return name + (f"{{{','.join(f'{key}={text}' for key, text in options.items())}}}" if options else "")


def _class_name(kind: type) -> str:
    try:
        importable = operator.attrgetter(kind.__qualname__)(sys.modules[kind.__module__])
    except (KeyError, AttributeError):
        importable = None
    if importable is not kind:
        raise ValueError(f"its class {kind.__qualname__} is not found by its name: define it at the top of a module")
    module = _script_module() if kind.__module__ == "__main__" else kind.__module__
    return f"{module}:{kind.__qualname__}"


def _script_module() -> str:
    main = sys.modules["__main__"]
    spec, script = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    name = spec.name if spec is not None else Path(script or "").stem
    if name == "__main__" or not re.fullmatch(r"[\w.-]+" if spec is not None else r"[\w-]+", name):
        where = f"in {script}, whose name no module has" if script else "in a session, which has no file"
        raise ValueError(f"its class is defined {where}: put it in a module of its own")
    return str(name)


def _options_of(compiler_pass: Pass) -> Iterator[tuple[str, str]]:
    kind = type(compiler_pass)
    fields = {field.name for field in dataclasses.fields(compiler_pass)} if dataclasses.is_dataclass(kind) else None
    for name, parameter in inspect.signature(kind).parameters.items():
        is_readable = name in fields if fields is not None else hasattr(compiler_pass, name)
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or not is_readable:
            raise ValueError(
                f"{kind.__name__} does not keep its argument {name!r} under that name: make it a dataclass"
            )
        value = getattr(compiler_pass, name)
        if not _are_equal(value, parameter.default):
            yield name, _value_text(name, value)


def _value_text(option: str, value: Any) -> str:
    try:
        text = repr(value)
        if _are_equal(_parse_value(ast.parse(text, mode="eval").body), value):
            return text
    except Exception as error:  # raised by the user's __repr__ or by the parser: it is not a plain value
        raise _not_plain(option, value) from error
    raise _not_plain(option, value)


def _not_plain(option: str, value: Any) -> ValueError:
    return ValueError(
        f"its option {option!r} is a {type(value).__qualname__}: only numbers, strings, booleans, None, torch's dtypes, and "
        "tuples, lists, sets and dicts of them, and plans of mirrorc.packing, can be written"
    )


def _are_equal(value: Any, other: Any) -> bool:
    """Compares types, too; nan equals nan."""
    if value is other or type(value) is not type(other):
        return value is other
    if isinstance(value, (tuple, list)):
        return len(value) == len(other) and all(map(_are_equal, value, other))
    if isinstance(value, dict):
        return _are_equal(list(value.items()), list(other.items()))
    if isinstance(value, float) and math.isnan(value):
        return math.isnan(other)
    return (value == other) is True


def _check_made_again(compiler_pass: Pass, options: Mapping[str, str]) -> None:
    kind = type(compiler_pass)
    values = {name: _parse_value(ast.parse(text, mode="eval").body) for name, text in options.items()}
    try:
        again = kind(**values)
        names = inspect.signature(kind).parameters
        differing = [name for name in names if not _are_equal(getattr(again, name), getattr(compiler_pass, name))]
    except Exception as error:
        raise ValueError(f"{kind.__qualname__} cannot be made again: {type(error).__name__}: {error}") from error
    if differing:
        raise ValueError(f"{kind.__qualname__}, made again from its options, has another {differing[0]!r}")


def parse_passes(text: str, known: Mapping[str, Callable[..., Pass]]) -> list[Pass]:
    """Creates the passes of a text. ``known`` maps names of mirrorc's passes to classes.

    Raises:
        ValueError: the text is malformed, or has an unknown pass or option.
    """
    passes, place = [], 0
    while text[place:].strip():
        match = _NAME.match(text, place)
        end = _end_of_options(text, match.end()) if match is not None else None
        separator = _SEPARATOR.match(text, end) if end is not None else None
        if match is None or end is None or separator is None:
            raise ValueError(
                f"MC4004: {text[place:]!r} in {text!r} is no pass: write name, or "
                f"name{{option=value,option=value}}, separated by commas"
            )
        passes.append(_make(match["name"], _options(match["name"], text[match.end() : end][1:-1]), known))
        place = separator.end()
    return passes


def _end_of_options(text: str, start: int) -> int | None:
    if not text.startswith("{", start):
        return start
    depth = 0
    for token in _STRING_OR_CHARACTER.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return None


def _options(name: str, text: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("an option has no name")
        if any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("** gives no option a name")
        return {str(keyword.arg): _parse_value(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, TypeError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise problem(
            ValueError,
            f"MC4004: the options of pass {name!r} cannot be read: {text!r}",
            str(reason),
            "write option=value, separated by commas, with Python literals as values",
        ) from error


def _parse_value(node: ast.expr) -> Any:
    """A Python literal that may also have inf, nan, torch's dtypes and plans of `mirrorc.packing`."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=values, keywords=named) if name in PLANS:
            options = {str(option.arg): _parse_value(option.value) for option in named}
            return PLANS[name](*map(_parse_value, values), **options)
        case ast.Name(id="inf" | "nan" as number):
            return float(number)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name()):
            return -_parse_value(node.operand)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name) if isinstance(getattr(torch, name, None), _OF_TORCH):
            return getattr(torch, name)
        case ast.Tuple(elts=items):
            return tuple(map(_parse_value, items))
        case ast.List(elts=items):
            return list(map(_parse_value, items))
        case ast.Set(elts=items):
            return set(map(_parse_value, items))
        case ast.Dict(keys=keys, values=values):
            if None in keys:
                raise ValueError(f"{ast.unparse(node)} is no plain value")
            pairs = zip(keys, values, strict=True)
            return {_parse_value(key): _parse_value(value) for key, value in pairs if key is not None}
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{ast.unparse(node)} is no plain value") from None


def _make(name: str, options: Mapping[str, Any], known: Mapping[str, Callable[..., Pass]]) -> Pass:
    make = known.get(name)
    if make is None and ":" in name:
        make = _imported_class(name)
    if make is None:
        listing = "`mirrorc passes` lists them; write module:Class for one of your own"
        raise ValueError(f"MC4004: there is no pass {name!r}: {guess(name, known, listing)}")
    try:
        made: Any = make(**options)
    except TypeError as error:
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(make) if dataclasses.is_dataclass(make) else ()
        names = ", ".join(field.name for field in fields if field.init) or "none"
        raise ValueError(f"MC4004: the pass {name!r} does not take these options ({error}); it has: {names}") from error
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"MC4004: making the pass {name!r} failed: {type(error).__name__}: {error}") from error
    if isinstance(made, type) or not isinstance(made, Pass):
        raise ValueError(
            f"MC4004: {name!r} gives a {type(made).__qualname__}, which is no pass: a pass has name, input_stage, "
            "output_stage and run(program)"
        )
    return made


def _imported_class(name: str) -> Callable[..., Pass]:
    module_name, _, qualified = name.partition(":")
    try:
        module = import_module(module_name)
    except ImportError as error:
        fix = ["put the pass in a module of its own", "guard what the script does with if __name__ == '__main__'"]
        if isinstance(error, ModuleNotFoundError):
            fix = [f"start Python in the folder of {module_name}.py, or with that folder in PYTHONPATH"]
        raise problem(ValueError, f"MC4004: the pass {name!r} cannot be imported", str(error), fix) from error
    try:
        maker: Callable[..., Pass] = operator.attrgetter(qualified)(module)
    except AttributeError as error:
        raise ValueError(f"MC4004: the pass {name!r} cannot be imported: {error}; write module:Class") from error
    if not callable(maker):
        raise ValueError(f"MC4004: {name!r} is a {type(maker).__qualname__}, not a class: write module:Class")
    return maker


def import_module(name: str) -> ModuleType:
    """Raises ModuleNotFoundError if there is no such module, and ImportError for any error in its code."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise ModuleNotFoundError(f"there is no module {missing!r}") from error
        reason = str(error).partition("\n")[0]
        raise ImportError(f"importing {name} failed: {type(error).__name__}: {reason:.300}") from error
