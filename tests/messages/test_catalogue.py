"""Codes of errors and warnings: each that is used is explained, each that is explained is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from typer.testing import CliRunner

from mirrorc.cli import app
from mirrorc.messages.catalogue import ENTRIES
from mirrorc.messages.problem import message, problem, with_line

ROOT = Path(__file__).parents[2]
_CODE = re.compile(r"\bMC\d{4}\b")
_MOST_WORDS = 20


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("mirrorc", "passes", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name != "catalogue.py":
                yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def _text(node: ast.AST) -> str | None:
    """A literal's text, with a word in the place of each value; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "value" for part in node.values)
    return None


def _calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Where a message is made, what it says, and the call."""
    for name, tree in _trees():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("problem", "message", "warn")
            ):
                what = _text(node.args[1 if node.func.id == "problem" else 0])
                if what is not None:
                    yield f"{name}:{node.lineno}", what, node


def test_each_code_is_explained_and_used() -> None:
    used: set[str] = set()
    for name, tree in _trees():
        texts = (_text(node) for node in ast.walk(tree))
        used |= {
            code for text in texts if text and name != "mirrorc/messages/problem.py" for code in _CODE.findall(text)
        }
    assert used == {*ENTRIES}


def test_what_happened_is_said_in_few_words_under_a_code() -> None:
    for place, what, _ in _calls():
        if not what.startswith("value: "):  # the code is a variable
            assert _CODE.match(what), place
        assert len(what.split()) - 1 <= _MOST_WORDS, f"{place}: {len(what.split()) - 1} words"


def test_a_message_says_what_to_type() -> None:
    for place, _, call in _calls():
        at = 3 if call.func.id == "problem" else 2  # type: ignore[attr-defined]
        has_fix = len(call.args) > at or any(keyword.arg == "fix" for keyword in call.keywords)
        assert has_fix or any(isinstance(argument, ast.Starred) for argument in call.args), place


def test_a_message_has_a_line_for_each_part() -> None:
    text = message("MC1304: too short", "the batch", ("one", "other"), at="f.py:3", now="unchanged")
    assert text.split("\n") == [
        "MC1304: too short",
        "  at:   f.py:3",
        "  why:  the batch",
        "  now:  unchanged",
        "  fix:  one",
        "  or:   other",
    ]
    assert message("MC1304: too short") == "MC1304: too short"
    assert str(problem(ValueError, "MC1304: too short", fix="one")) == "MC1304: too short\n  fix:  one"


def test_lines_are_added_before_the_fixes_and_fixes_at_the_end() -> None:
    text = message("MC1304: too short", fix="one")
    assert with_line(text, "now", "unchanged") == "MC1304: too short\n  now:  unchanged\n  fix:  one"
    assert with_line(text, "fix", "other") == "MC1304: too short\n  fix:  one\n  or:   other"
    assert with_line("MC1304: too short", "fix", "one") == text


def test_the_command_explains_a_code() -> None:
    for code in ("MC1304", "mc1304", "1304"):
        done = CliRunner().invoke(app, ["explain-error", code])
        assert (
            done.exit_code == 0
            and done.stdout.startswith(f"MC1304: {ENTRIES['MC1304'].title} (")
            and "mirrorc.replicated" in done.stdout
        )
    wrong = CliRunner().invoke(app, ["explain-error", "MC1394"])
    assert wrong.exit_code == 2 and "did you mean 'MC1" in wrong.stderr
    other = CliRunner().invoke(app, ["explain-error", "x"])
    assert other.exit_code == 2 and "there is no MCX; codes are MC1001 to MC7201" in other.stderr
