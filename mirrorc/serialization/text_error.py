"""Errors of programs that cannot be written as text, or read from it."""

from __future__ import annotations

import ast


class TextError(Exception):
    """A value without a text, or a text that is no program. The caller adds the file's name and a remedy.

    Attributes:
        node: the part of the text that is wrong; its line counts from ``line``.
        line: the number of the line with the error, once known.
    """

    def __init__(self, reason: str, node: ast.AST | None = None, line: int | None = None, column: int = 0) -> None:
        super().__init__(reason)
        self.node, self.line, self.column = node, line, column

    def at(self, first_line: int, indent: int = 0) -> TextError:
        """Fills in where the error is: its node was parsed from a text that begins at this line and column."""
        if self.line is None:
            offset = getattr(self.node, "lineno", 1) - 1
            self.line = first_line + offset
            self.column = getattr(self.node, "col_offset", 0) + (indent if offset == 0 else 0)
        return self


class UnknownOperatorError(TextError):
    """Raised if this process has no operator of the name."""


def expression(text: str) -> ast.expr:
    """Parses a Python expression. Nothing in it is run.

    Raises:
        TextError: the text is none, or is nested too deeply.
    """
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        line, column = error.lineno or 1, max(0, (error.offset or 1) - 1)
        where = ast.Name(id="", lineno=line, col_offset=column)
        raise TextError(f"this is no expression: {error.msg}", where) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise TextError(f"this cannot be read: {error or 'it is nested too deeply'}") from None
