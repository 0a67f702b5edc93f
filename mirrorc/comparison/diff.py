"""Compares two programs by their printed form: first in words, then line by line.

Ignores reports on passes and the user's source lines, so moving the model's code in its file makes no difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mirrorc.comparison.body_changes import (
    argument_changes,
    body_changes,
    device_changes,
    group_changes,
    optimizer_changes,
    remark_changes,
    worker_changes,
)
from mirrorc.comparison.bucket_changes import bucket_changes, pair_buckets
from mirrorc.comparison.schedule_changes import schedule_changes
from mirrorc.comparison.text_changes import is_source, text_changes
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.printing.folding import is_mark
from mirrorc.printing.printed_program import PrintedProgram
from mirrorc.printing.reader import read_program_text

_CANONICAL = {"slots": True, "sources": False}
_LISTED_SLOT = re.compile(r"#     \S")
_SEVERAL_DEVICES = re.compile(r"    (?:each|\S+(?:, \S+| … \S+)+) +\| ")


def diff_texts(old: str, new: str) -> str:
    """The differences of two printed programs, of any stage; empty if there are none.

    Args:
        old: a text from `Program.to_text`.
        new: a text printed with the same options.

    Returns:
        One sentence per line, the most important first; after an empty line, the differing lines.

    Raises:
        TypeError: an argument is not a string.
        ValueError: an argument is not a printed program.
    """
    if old == new:
        _read(new, "new")
        return ""
    programs = _read(old, "old"), _read(new, "new")
    lines = text_changes(old, new, programs)
    if not lines:
        return ""
    sentences = list(_sentences(*programs)) or ["no device, bucket, collective or region changed, but these lines did"]
    return "\n".join([*sentences, "", *lines]) + "\n"


def diff_programs(old: Program, new: Program, *, regions: bool = False) -> str:
    """The differences of two programs; empty if there are none.

    Args:
        regions: compare the bodies of regions, too. If False, the result mentions them only if nothing else differs.

    Raises:
        TypeError: an argument is not a program.
    """
    for name, program in (("old", old), ("new", new)):
        if not isinstance(program, Program):
            raise TypeError(f"MC7104: {name} is a {type(program).__name__}: give a Program, such as step.program")
    differences = diff_texts(*(program.to_text(regions=regions, **_CANONICAL) for program in (old, new)))
    if (
        differences
        or regions
        or not diff_texts(*(program.to_text(regions=True, **_CANONICAL) for program in (old, new)))
    ):
        return differences
    return "only the bodies of regions differ: pass regions=True to see how\n"


def diff_files(old: Path, new: Path) -> str:
    """The differences of two files, each a saved or a printed program; empty if there are none.

    Two saved programs are compared with bodies of regions. Against a printed program, only its printed parts are compared.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is neither a saved nor a printed program.
    """
    loaded = [_load(path) for path in (old, new)]
    forms = [_form_of(program) for program in loaded if isinstance(program, str)]
    form = forms[0] if forms else {"regions": True, **_CANONICAL}
    texts = [
        content if isinstance(content, str) else printed(content, path, **form)
        for content, path in zip(loaded, (old, new), strict=True)
    ]
    return diff_texts(*texts)


def _load(path: Path) -> Program | str:
    with path.open("rb") as file:
        is_printed = file.read(2) == b"# "
    return path.read_text(encoding="utf-8") if is_printed else Program.load(path)


def printed(
    program: Program, path: Path, *, regions: bool, slots: bool, sources: bool, fold: bool | None = None
) -> str:
    """Raises ValueError, which names ``path``, if the program is too malformed to print."""
    try:
        return program.to_text(regions=regions, slots=slots, sources=sources, fold=fold)
    except Exception as error:  # the printer may fail in any way on a program that breaks the rules
        raise problem(
            ValueError,
            f"MC7104: cannot print {path}",
            f"it is malformed ({type(error).__name__}: {error})",
            f"mirrorc verify {path}, which says what is wrong with it",
        ) from error


def _form_of(text: str) -> dict[str, bool]:
    lines = text.split("\n")
    return {
        "regions": any(line.startswith("region ") for line in lines),
        "slots": any(_LISTED_SLOT.match(line) for line in lines),
        "sources": any(is_source(line) for line in lines),
        "fold": any(_is_folded(line) for line in lines),
    }


def _is_folded(line: str) -> bool:
    return is_mark(line) or ", but for these lines" in line or _SEVERAL_DEVICES.match(line) is not None


def _read(text: str, name: str) -> PrintedProgram:
    try:
        return read_program_text(text)
    except ValueError as error:
        reason = str(error).removeprefix("MC7104: ")
        raise ValueError(f"MC7104: the {name} text cannot be compared: {reason}") from None


def _sentences(old: PrintedProgram, new: PrintedProgram) -> Iterator[str]:
    pairs = pair_buckets(old, new)
    yield from worker_changes(old, new)
    yield from device_changes(old, new)
    if old.stage != new.stage:
        yield f"the stage changed from {old.stage} to {new.stage}"
    yield from bucket_changes(pairs)
    yield from schedule_changes(old, new, pairs.new_of)
    yield from argument_changes(old, new)
    yield from body_changes(old, new)
    yield from group_changes(old, new)
    yield from optimizer_changes(old, new)
    yield from remark_changes(old, new)
