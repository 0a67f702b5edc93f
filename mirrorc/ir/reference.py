"""Writes the operations of the IR as a Markdown page; see `python -m mirrorc.ir`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator

from mirrorc.ir import ops
from mirrorc.ir.operation import Effect, Operation, Printed, operations


def reference(of: Iterable[Operation] | None = None) -> str:
    """The page's text. ``of`` is mirrorc's own operations by default."""
    records = (
        [record for record in operations() if record.symbol.__module__ == ops.__name__] if of is None else list(of)
    )
    sections = []
    for kind in dict.fromkeys(record.kind for record in records):
        lines = [f"## {kind.name.capitalize()}", ""]
        for record in records:
            if record.kind is kind:
                lines += [*_entry(record), ""]
        sections.append("\n".join(lines))
    return "\n".join(sections).rstrip() + "\n"


def _entry(record: Operation) -> Iterator[str]:
    yield f"### `{record.name}`"
    yield ""
    yield record.summary
    yield ""
    yield "| | |"
    yield "|---|---|"
    for title, text in (
        ("operands", _operands(record)),
        ("keywords", _keywords(record)),
        ("type", (inspect.getdoc(record.gives) or "") if record.gives is not None else "As noted."),
        ("effects", "; ".join(effect.value for effect in Effect if effect in record.effects) or "none"),
        ("value", f"`{record.called}`" if record.called else ""),
        ("printed", _printed(record)),
        (
            "stages",
            record.since.name if record.since is record.until else f"{record.since.name} to {record.until.name}",
        ),
    ):
        if text:
            yield f"| {title} | {text} |"


def _operands(record: Operation) -> str:
    parameters = inspect.signature(record.symbol).parameters.values()
    names = [f"`{'*' if p.kind is p.VAR_POSITIONAL else ''}{p.name}`" for p in parameters if _is_operand(p)]
    per = f", one for each of `{record.operands}`" if isinstance(record.operands, str) else ""
    return ", ".join(names) + per


def _is_operand(parameter: inspect.Parameter) -> bool:
    return parameter.kind is not parameter.KEYWORD_ONLY


def _keywords(record: Operation) -> str:
    parameters = inspect.signature(record.symbol).parameters.values()
    named = [p for p in parameters if not _is_operand(p) and p.name != "replica"]
    return ", ".join(f"`{p.name}`" if p.name in record.keywords else f"[`{p.name}`]" for p in named)


def _printed(record: Operation) -> str:
    shown = ", ".join(f"`{key}`" for key in record.shown)
    return record.printed.value + (f", with {shown}" if shown and record.printed is Printed.LINE else "")
