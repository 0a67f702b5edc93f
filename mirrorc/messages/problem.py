"""The form of errors and warnings: what happened, with a code; then where, why, and something to type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

E = TypeVar("E", bound=Exception)
_CODE = re.compile(r"MC\d{4}: ")


def problem(
    kind: type[E], what: str, why: str = "", fix: str | Sequence[str] = "", *, at: str = "", now: str = ""
) -> E:
    return kind(message(what, why, fix, at=at, now=now))


def message(what: str, why: str = "", fix: str | Sequence[str] = "", *, at: str = "", now: str = "") -> str:
    """``MC1304: what``, then lines ``at:``, ``why:``, ``now:`` and ``fix:`` if given.

    Args:
        what: a code of `mirrorc.messages.catalogue`, and what happened, in at most 20 words.
        fix: something to type; several are alternatives.
        at: the user's line.
        now: the state after the error.
    """
    fixes = [fix] if isinstance(fix, str) else [*fix]
    lines = [("at", at), ("why", why), ("now", now), *zip(("fix", *("or",) * len(fixes)), fixes, strict=False)]
    return what + "".join(_line(label, text) for label, text in lines if text)


def has_code(error: Exception) -> bool:
    """True if its text is a `message`, which names the problem already."""
    return _CODE.match(str(error)) is not None


def with_line(text: str, label: str, line: str) -> str:
    """A message with an additional line: "at" as the second line, "fix" at the end, other labels before the fixes."""
    if label == "fix":
        return text + _line("or" if "\n  fix: " in text else label, line)
    head, mark, fixes = text.partition("\n" if label == "at" else "\n  fix: ")
    return f"{head}{_line(label, line)}{mark}{fixes}"


def _line(label: str, text: str) -> str:
    return f"\n  {label + ':':5} {text if text.endswith('...') else text.removesuffix('.')}"
