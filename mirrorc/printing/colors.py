"""Colors printed programs in a terminal, with the package rich."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from mirrorc.ir.operation import Kind, Printed, operations

if TYPE_CHECKING:
    from rich.text import Text

_COMMENT = (r"(?P<comment>#.*)$", "bright_black")
_STYLES = (
    (r"^(?P<keyword>def|region)\b|\b(?P<return>return)\b", "bold magenta"),
    (r"\b(?P<region>(?:fwd|bwd)_\d+(?:\.shard\d+)?)\b", "bold cyan"),
    (r"(?P<type>(?:pending |share of )?\b(?:bool|(?:bf|f|i|u|c)\d+)\[[\d, ]*\])", "blue"),
)
_OF_KINDS = {
    "bold yellow": (Kind.LAUNCH, Kind.WAIT),
    "bold green": (Kind.CHECK, Kind.GATHER, Kind.FACTORED, Kind.PACK, Kind.UPDATE, Kind.WRITE),
    "bold cyan": (Kind.COMPUTE, Kind.SOURCE),
}
"""Styles of operations. A region call has none, because its operation's name is not printed."""


def colored(text: str) -> Text:
    from rich.text import Text

    result = Text(text)
    for pattern, style in (*_STYLES, *_operation_styles(), _COMMENT):  # comments last, to override styles within them
        result.highlight_regex(f"(?m){pattern}", style)
    return result


def _operation_styles() -> Iterator[tuple[str, str]]:
    for style, kinds in _OF_KINDS.items():
        listed = (operation for operation in operations() if operation.kind in kinds)
        names = [operation.name for operation in listed if operation.printed is not Printed.WHERE_USED]
        if names:
            yield rf"\b(?P<operation>{'|'.join(names)})(?=\()", style


def print_colored(text: str, stream: TextIO) -> None:
    if not stream.isatty():
        stream.write(text if text.endswith("\n") else text + "\n")
        return
    from rich.console import Console

    Console(file=stream, soft_wrap=True).print(colored(text))
