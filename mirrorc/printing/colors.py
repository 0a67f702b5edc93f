"""Colors programs: a lexer for Pygments, found as ``mirror`` or by file name, and the package rich for terminals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from pygments.lexer import RegexLexer, bygroups
from pygments.token import Comment, Keyword, Name, Number, String, Text, Token

if TYPE_CHECKING:
    from rich.text import Text as RichText

_TOKENS = {
    **dict.fromkeys(("launch", "wait"), Name.Exception),
    **dict.fromkeys(("check", "gather", "factored", "pack", "update", "write"), Name.Function),
    **dict.fromkeys(("operator", "source"), Name.Builtin),
}


def _called(lexer: RegexLexer, match: re.Match[str]) -> Iterator[tuple[int, Any, str]]:
    import mirrorc.ir.ops  # noqa: F401 - declares the operations; imports torch, which a search for a lexer does not need
    from mirrorc.ir.operation import operation_named

    operation = operation_named(match[0])
    yield match.start(), _TOKENS.get(operation.kind.value, Name) if operation is not None else Name, match[0]


class MirrorLexer(RegexLexer):
    name = "mirrorc program"
    aliases: ClassVar = ["mirror", "mirrorc"]
    filenames: ClassVar = ["*.mirror"]
    tokens: ClassVar = {
        "root": [
            (r"#.*", Comment),
            (r'"(\\.|[^"\\\n])*"', String),
            (r"^(def|region)( )(\S+?)(?=\()", bygroups(Keyword, Text, Name.Class)),
            (r"^@\w+|\breturn\b", Keyword),
            (r"(?:pending |share of )?\b(?:bool|(?:bf|f|i|u|c)\d+|size)\[[^\]\n]*\](?:\{[^}\n]*\})?", Keyword.Type),
            (r"\b(?:fwd|bwd)_\d+(?:\.shard\d+|_shard\d+)?\b", Name.Class),
            (r"[A-Za-z_]\w*(?=\()", _called),
            (r"[A-Za-z_][\w.]*", Name),
            (r"\d[\w.]*", Number),
            (r"\s+|.", Token.Text),
        ]
    }


def colored(text: str) -> RichText:
    from rich.syntax import Syntax

    return Syntax("", MirrorLexer(stripnl=False, ensurenl=False), theme="ansi_dark").highlight(text)


def print_colored(text: str, stream: TextIO) -> None:
    if not stream.isatty():
        stream.write(text if text.endswith("\n") else text + "\n")
        return
    from rich.console import Console

    Console(file=stream, soft_wrap=True).print(colored(text))
