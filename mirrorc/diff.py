"""What differs between two programs: first in words, from their printed form alone, then line by line.

What is said of a pass in the heading and below it does not count, nor do the user's source lines. So two dumps of one program are
equal although they tell of different passes, and a program is equal to itself after its model's code has moved.
"""

from __future__ import annotations

from collections.abc import Iterator

from mirrorc.comparison.body_changes import (
    argument_changes,
    body_changes,
    device_changes,
    group_changes,
    remark_changes,
)
from mirrorc.comparison.bucket_changes import bucket_changes, pair_buckets
from mirrorc.comparison.printed_program import PrintedProgram
from mirrorc.comparison.schedule_changes import schedule_changes
from mirrorc.comparison.text_changes import text_changes
from mirrorc.comparison.text_reader import read_program_text
from mirrorc.program import Program


def diff_texts(old: str, new: str) -> str:
    """What differs between two printed programs, of any stage; empty if nothing does.

    Args:
        old: a text that `Program.to_text` has given.
        new: another. Print both with ``slots=True``: what is not printed cannot be compared.

    Returns:
        Sentences, each on a line of its own, the most important first; then, after an empty line, the lines that differ.

    Raises:
        TypeError: not two strings.
        ValueError: one is no printed program; says which one, the line, and what was expected there.
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
    """What differs between two programs; empty if nothing does.

    Args:
        old: a program of any stage.
        new: another.
        regions: compare the bodies of regions, too.

    Raises:
        TypeError: not two programs.
    """
    for name, program in (("old", old), ("new", new)):
        if not isinstance(program, Program):
            raise TypeError(f"{name} is a {type(program).__name__}: give a Program, such as step.program")
    texts = (program.to_text(regions=regions, slots=True, sources=False) for program in (old, new))
    return diff_texts(*texts)


def _read(text: str, name: str) -> PrintedProgram:
    try:
        return read_program_text(text)
    except ValueError as error:
        raise ValueError(f"the {name} text cannot be compared: {error}") from None


def _sentences(old: PrintedProgram, new: PrintedProgram) -> Iterator[str]:
    pairs = pair_buckets(old, new)
    yield from device_changes(old, new)
    if old.stage != new.stage:
        yield f"the stage changed from {old.stage} to {new.stage}"
    yield from bucket_changes(pairs)
    yield from schedule_changes(old, new, pairs.new_of)
    yield from argument_changes(old, new)
    yield from body_changes(old, new)
    yield from group_changes(old, new)
    yield from remark_changes(old, new)
