"""Writes a page with all operations of the IR from their declarations; `python -m mirrorc.ir` prints it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

from mirrorc.ir import ops
from mirrorc.ir.operation import Effect, Operation, Printed, operations

_OPENING = """# The operations of the IR

This page is made of the declarations in `mirrorc/ir/ops.py`; `python -m mirrorc.ir > docs/ir.md` renews it.

A captured, mirrored or lowered graph calls these operations and functional operators of torch; regions have operators alone.
In a mirrored graph every operation but collectives has the keyword `replica`, which lowered graphs lack. Keywords in brackets
may be left out. "Type" is that of the value that an operation gives, and what its operands must fit.
"""


def reference(of: Iterable[Operation] | None = None) -> str:
    """The page, in Markdown: a section for each kind of operation, in order of declaration. ``of``: mirrorc's own by default."""
    own = [found for found in operations() if found.symbol.__module__ == ops.__name__] if of is None else list(of)
    sections = [_OPENING]
    for kind in dict.fromkeys(found.kind for found in own):
        lines = [f"## {kind.name.capitalize()}", ""]
        for found in own:
            if found.kind is kind:
                lines += [*_entry(found), ""]
        sections.append("\n".join(lines))
    return "\n".join(sections).rstrip() + "\n"


def _entry(found: Operation) -> Iterator[str]:
    yield f"### `{found.name}`"
    yield ""
    yield found.summary
    yield ""
    yield "| | |"
    yield "|---|---|"
    for title, text in (
        ("operands", _operands(found)),
        ("keywords", _keywords(found)),
        ("type", (inspect.getdoc(found.gives) or "") if found.gives is not None else "As noted."),
        ("effects", "; ".join(effect.value for effect in _in_order(found)) or "none"),
        ("value", f"`{found.called}`" if found.called else ""),
        ("printed", _printed(found)),
        ("stages", found.since.name if found.since is found.until else f"{found.since.name} to {found.until.name}"),
    ):
        if text:
            yield f"| {title} | {text} |"


def _operands(found: Operation) -> str:
    parameters = inspect.signature(found.symbol).parameters.values()
    names = [
        f"`{p}`" for p in (("*" if p.kind is p.VAR_POSITIONAL else "") + p.name for p in parameters if _is_operand(p))
    ]
    per = f", one for each of `{found.operands}`" if isinstance(found.operands, str) else ""
    return ", ".join(names) + per


def _is_operand(parameter: inspect.Parameter) -> bool:
    return parameter.kind is not parameter.KEYWORD_ONLY


def _keywords(found: Operation) -> str:
    named = [
        p for p in inspect.signature(found.symbol).parameters.values() if not _is_operand(p) and p.name != "replica"
    ]
    return ", ".join(f"`{p.name}`" if p.name in found.keywords else f"[`{p.name}`]" for p in named)


def _in_order(found: Operation) -> list[Effect]:
    return [effect for effect in Effect if effect in found.effects]


def _printed(found: Operation) -> str:
    shown = ", ".join(f"`{key}`" for key in found.shown)
    return found.printed.value + (f", with {shown}" if shown and found.printed is Printed.LINE else "")
