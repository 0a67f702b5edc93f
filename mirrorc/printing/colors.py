"""Programs in colours, where they are shown in a terminal; the colours are rich's."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = (
    (r"(?P<comment>#.*)$", "bright_black"),
    (r"^(?P<keyword>def|region)\b|\b(?P<return>return)\b", "bold magenta"),
    (r"\b(?P<launch>all_reduce|reduce_scatter|broadcast|send|recv|wait)(?=\()", "bold yellow"),
    (r"\b(?P<region>(?:fwd|bwd)_\d+)\b", "bold cyan"),
    (r"\b(?P<update>update|step_optimizer|store|write|pack)(?=\()", "bold green"),
    (r"(?P<type>(?:pending |share of )?\b(?:bool|(?:bf|f|i|u|c)\d+)\[[\d, ]*\])", "blue"),
)


def coloured(text: str) -> Text:
    """A printed program as rich text."""
    from rich.text import Text

    result = Text(text)
    for pattern, style in _STYLES[1:]:
        result.highlight_regex(f"(?m){pattern}", style)
    result.highlight_regex(f"(?m){_STYLES[0][0]}", _STYLES[0][1])  # last: what is in a comment is comment
    return result


def print_coloured(text: str, stream: TextIO) -> None:
    """Writes a printed program; in colours if the stream is a terminal that has them, else as it is."""
    if not stream.isatty():
        stream.write(text if text.endswith("\n") else text + "\n")
        return
    from rich.console import Console

    Console(file=stream, soft_wrap=True).print(coloured(text))
