"""Errors of programs that cannot be written as text or read from it."""

from __future__ import annotations

import ast
from typing import Any


class TextError(Exception):
    """A value without a text form, or a malformed text. The caller adds the file's name and a remedy.

    Attributes:
        node: the wrong part of the text; its position is relative to the parsed part.
        line, column: the error's position in the text, from 1 and 0; None if not known yet.
    """

    def __init__(self, reason: str, node: ast.AST | None = None, line: int | None = None, column: int = 0) -> None:
        super().__init__(reason)
        self.node, self.line, self.column = node, line, column

    def at(self, first_line: int, indent: int = 0) -> TextError:
        """Sets the position of the error: its node was parsed from a text that begins at this line and column."""
        if self.line is None:
            offset = getattr(self.node, "lineno", 1) - 1
            self.line = first_line + offset
            self.column = getattr(self.node, "col_offset", 0) + (indent if offset == 0 else 0)
        return self


class UnknownOperatorError(TextError):
    """Raised if this process has no operator of this name."""


def expression(text: str) -> ast.expr:
    """Parses a Python expression. Nothing in it is run.

    Raises:
        TextError: the text is not an expression.
    """
    body: ast.expr = _parsed(text, "eval").body
    return body


def assignment(text: str) -> tuple[str, ast.expr]:
    """Parses ``NAME = EXPRESSION``. Raises `TextError` for another text."""
    statement = _parsed(text, "exec").body[:1]
    if not statement or not isinstance(statement[0], ast.Assign) or not isinstance(statement[0].targets[0], ast.Name):
        raise TextError("here comes a table 'NAME = ...' or a function, with @shard, @mirrored, @device or @region")
    return statement[0].targets[0].id, statement[0].value


def _parsed(text: str, mode: str) -> Any:
    try:
        return ast.parse(text, mode=mode)
    except SyntaxError as error:
        where = ast.Name(id="", lineno=error.lineno or 1, col_offset=max(0, (error.offset or 1) - 1))
        raise TextError(f"this is no expression: {error.msg}", where) from None
    except ValueError as error:
        raise TextError(f"this cannot be read: {error}") from None


def keywords_of(call: ast.Call) -> dict[str, ast.expr]:
    """The keyword arguments of a call. Raises `TextError` for repeated keywords and ``**``."""
    given: dict[str, ast.expr] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in given:
            raise TextError(f"{keyword.arg} is given twice" if keyword.arg else "'**' stands for no keyword", keyword)
        given[keyword.arg] = keyword.value
    return given
