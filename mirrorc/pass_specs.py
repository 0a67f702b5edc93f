"""Pipelines as text: ``plan-buckets{bucket_cap_mb=5.0},outline-regions``, for the command line."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mirrorc.pass_manager import Pass

_SPEC = re.compile(r"\s*(?P<name>[\w.:<>-]+)\s*(?:\{(?P<options>[^{}]*)\})?\s*(?:,|$)")


def format_passes(passes: Sequence[Pass]) -> str:
    """A pipeline as text; options that have their default value are left out.

    A pass that is not mirrorc's own is written as ``module:Class``.
    """
    return ",".join(_format(compiler_pass) for compiler_pass in passes)


def _format(compiler_pass: Pass) -> str:
    kind = type(compiler_pass)
    is_own = kind.__module__.startswith("mirrorc.passes.")
    name = compiler_pass.name if is_own else f"{_module(kind)}:{kind.__qualname__}"
    options: dict[str, Any] = {}
    fields: tuple[dataclasses.Field[Any], ...] = (
        dataclasses.fields(compiler_pass) if dataclasses.is_dataclass(compiler_pass) else ()
    )
    for field in fields:
        value = getattr(compiler_pass, field.name)
        if field.init and value != field.default:
            options[field.name] = value
    return name + (f"{{{','.join(f'{key}={value!r}' for key, value in options.items())}}}" if options else "")


def _module(kind: type) -> str:
    """The module that a class can be imported from; of a script that is being run, its file's name."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return Path(script).stem if kind.__module__ == "__main__" and script else kind.__module__


def parse_passes(text: str, known: Mapping[str, Callable[..., Pass]]) -> list[Pass]:
    """The passes that a text names.

    Args:
        text: names with options, separated by commas; ``module:Class`` for a pass of one's own.
        known: mirrorc's own passes, by name.

    Raises:
        ValueError: the text is malformed, or names a pass or an option that does not exist; says which there are.
    """
    passes, place = [], 0
    while place < len(text):
        match = _SPEC.match(text, place)
        if match is None:
            raise ValueError(
                f"{text[place:]!r} in {text!r} is no pass: write name, or name{{option=value,option=value}}, separated by commas"
            )
        passes.append(_make(match["name"], _options(match["name"], match["options"] or ""), known))
        place = match.end()
    return passes


def _options(name: str, text: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("an option has no name")
        return {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"the options of {name!r}, {text!r}, are not option=value with plain values: {error}"
        ) from error


def _literal(value: ast.expr) -> Any:
    if isinstance(value, ast.Name) and value.id in ("inf", "nan"):
        return float(value.id)
    return ast.literal_eval(value)


def _make(name: str, options: Mapping[str, Any], known: Mapping[str, Callable[..., Pass]]) -> Pass:
    make = known.get(name)
    if make is None and ":" in name:
        module, _, qualified = name.partition(":")
        try:
            make = getattr(importlib.import_module(module), qualified)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"the pass {name!r} cannot be imported: {error}; run from where its module is found"
            ) from error
    if make is None:
        raise ValueError(
            f"there is no pass {name!r}: there are {', '.join(known)}, and module:Class for one of your own"
        )
    try:
        return make(**options)
    except TypeError as error:
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(make) if dataclasses.is_dataclass(make) else ()
        names = ", ".join(field.name for field in fields if field.init) or "none"
        raise ValueError(f"the pass {name!r} does not take these options ({error}); it has: {names}") from error
