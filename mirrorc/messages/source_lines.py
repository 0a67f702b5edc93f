"""Finds the user's source line for a node, an exception, or the running code; warns there."""

from __future__ import annotations

import operator
import re
import sys
import traceback
import warnings
from collections.abc import Sequence

from torch import fx

from mirrorc.messages.problem import message
from mirrorc.torch_internals import is_users_file


def source_line(node: fx.Node) -> str:
    """The user's line of a node, as ``file.py:14  code``, else its module's name; empty if unknown."""
    while node.target is operator.getitem and not node.meta.get("stack_trace"):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    line = last_users_line(node.meta.get("stack_trace") or "")
    if line:
        return line
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    if not modules:
        return ""
    kind = modules[-1][1]
    return f"{module_of(node)} ({getattr(kind, '__name__', str(kind).rsplit('.', 1)[-1])})".strip()


LINE_OF_TEXT = "line_of_text"
"""The key in `node.meta` of the line in a program's text from which a node was read."""


def place_of(node: fx.Node) -> str:
    """A node's line in the user's code, and its line if the program was read from text; empty if unknown."""
    number = node.meta.get(LINE_OF_TEXT)
    in_text = f"line {number} of the program's text" if number is not None else ""
    return ", ".join(filter(None, (in_text, source_line(node))))


def module_of(node: fx.Node) -> str:
    """A node's module, by its name in ``model.named_modules()``; empty if unknown."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(modules[-1][0]) if modules else ""
    return path.removeprefix("L['self']").removeprefix(".").removeprefix("model").removeprefix(".")


_FRAME = re.compile(r'File "(.*?)", line (.*)')


def last_users_line(stack_trace: str) -> str:
    """The user's innermost line in a printed stack trace; may be empty."""
    frame = last_users_frame(stack_trace)
    return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}  {frame.line}".rstrip() if frame is not None else ""


def line_of(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno}  {frame.line}".rstrip()


def last_users_frame(stack_trace: str) -> traceback.FrameSummary | None:
    lines = [line.strip() for line in stack_trace.splitlines()]
    for i in range(len(lines) - 1, -1, -1):
        frame = _FRAME.match(lines[i])
        if frame is not None and is_users_file(frame[1]):
            code = lines[i + 1] if i + 1 < len(lines) and not _FRAME.match(lines[i + 1]) else ""
            number, _, function = frame[2].partition(", in ")
            return traceback.FrameSummary(frame[1], int(number), function, line=code)
    return None


def raising_line(error: BaseException) -> str:
    """The user's innermost line in an exception's traceback; may be empty."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users_file(frame.filename):
            return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}  {frame.line}".rstrip()
    return ""


def users_stack_level() -> int:
    """The ``stacklevel`` with which the caller's `warnings.warn` names the user's innermost line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not is_users_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level


def warn(what: str, why: str = "", fix: str | Sequence[str] = "") -> None:
    """Warns with a `message` at the user's innermost line."""
    warnings.warn(message(what, why, fix), stacklevel=users_stack_level())
