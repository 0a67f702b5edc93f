"""The commands that describe the compiler: ``passes``, ``rules`` and ``explain-error``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from mirrorc.cli.failures import fail
from mirrorc.messages.catalogue import ENTRIES
from mirrorc.messages.wording import guess

Names = Annotated[list[str] | None, typer.Argument(help="only these, with their whole docstrings")]


def passes(names: Names = None) -> None:
    """Lists the passes in order, with their options."""
    from mirrorc.passes import PASSES
    from mirrorc.pipeline.protocol import PassDescription

    for name in _checked(names, PASSES, "pass", "mirrorc passes"):
        described = PassDescription.of(PASSES[name]())
        out_of = f", left out of {described.left_out_of}" if described.left_out_of else ""
        options = f"options: {described.options}" if described.options else ""
        _write(f"{name}: {described.stages}{out_of}", described.docstring, options, is_whole=bool(names))


def rules(names: Names = None) -> None:
    """Lists the rules of the verifier."""
    from mirrorc.verifier.rules.rule import rules as registered

    known = {rule.name: rule for rule in registered()}
    for name in _checked(names, known, "rule", "mirrorc rules"):
        docstring = inspect.getdoc(known[name].check) or ""
        _write(f"{name}: applies {known[name].applies}", docstring, is_whole=bool(names))


def explain_error(code: Annotated[str, typer.Argument(help="as MC1304; lower case will do")]) -> None:
    """Explains the code of an error or a warning."""
    wanted = "MC" + code.strip().upper().removeprefix("MC")
    if (entry := ENTRIES.get(wanted)) is None:
        fail(f"there is no {wanted}; {guess(wanted, ENTRIES, f'codes are {min(ENTRIES)} to {max(ENTRIES)}')}")
    sys.stdout.write(f"{entry.code}: {entry.title} ({entry.group})\n\n{entry.text}\n")


def _checked(names: list[str] | None, known: Iterable[str], kind: str, listing: str) -> Iterable[str]:
    for name in names or ():
        if name not in known:
            fail(f"there is no {kind} {name!r}: {guess(name, known, f'{listing} lists them')}")
    return names or known


def _write(heading: str, docstring: str, options: str = "", *, is_whole: bool) -> None:
    summary = " ".join(docstring.partition("\n\n")[0].split()).rstrip(":")
    text = docstring if is_whole else summary
    lines = [heading, *(f"    {line}".rstrip() for line in (*text.splitlines(), options) if line or is_whole)]
    sys.stdout.write("\n".join(lines).rstrip() + "\n" * (2 if is_whole else 1))
