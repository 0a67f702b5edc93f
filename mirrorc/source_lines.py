"""Where in the user's source a node of a graph comes from."""

from __future__ import annotations

import operator

from torch import fx

from mirrorc.torch_internals import is_users_file


def source_line(node: fx.Node) -> str:
    """The user's line that a node comes from, as ``file.py:14  code``, else its module's name; empty if unknown."""
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
    path, kind = modules[-1]
    name = str(path).rpartition(".model")[2].strip(".")
    return f"{name} ({getattr(kind, '__name__', str(kind).rsplit('.', 1)[-1])})".strip()


def last_users_line(stack_trace: str) -> str:
    """The innermost line of a printed stack trace that is the user's own, as ``file.py:14  code``; empty if there is none."""
    lines = [line.strip() for line in stack_trace.splitlines()]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith("File ") and ", line " in lines[i]:
            path, rest = lines[i].removeprefix('File "').split('", line ', 1)
            if is_users_file(path):
                code = lines[i + 1] if i + 1 < len(lines) else ""
                return f"{path.rsplit('/', 1)[-1]}:{rest.split(',')[0]}  {code}".rstrip()
    return ""
