"""Compares two programs by a unified diff of their printed forms, with the bucket, function or region above each
change.

Reports on passes and the user's source lines are ignored, so moving the model's code makes no difference.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.printing.folding import is_mark

_CANONICAL = {"slots": True, "sources": False}
_LISTED_SLOT = re.compile(r"#     \S")
_SEVERAL_DEVICES = re.compile(r"    (?:each|\S+(?:, \S+| … \S+)+) +\| ")
_FIRST_LINE = "# mirrorc · "
_MEASURED = re.compile(r" · after .+?(?= · stage )| · \d+(?:\.\d+)? ms$")
_OF_THE_PASS = re.compile(r"# (\d+ nodes( |$)|remark of this pass: )")
_BEGINS_PART = re.compile(r"(?:# (bucket \d+)|(def \w+|region [\w.]+)\(|([a-z_]+) = )")
_MOST_LINES = 200  # the most lines that are shown
_CONTEXT = 2  # lines that are shown around those that differ
_COMPARED = 3000  # the most lines of a part that are compared: more than are shown


def diff_programs(old: Program, new: Program, *, regions: bool = False) -> str:
    """The differences of two programs; empty if there are none.

    Args:
        regions: also compare bodies of regions. If False, they are mentioned only if nothing else differs.
    """
    for name, program in (("old", old), ("new", new)):
        if not isinstance(program, Program):
            raise TypeError(f"MC7104: {name} is a {type(program).__name__}: give a Program, such as step.program")
    differences = diff_texts(*(program.to_text(regions=regions, **_CANONICAL) for program in (old, new)))
    if differences or regions:
        return differences or _of_complete_texts(old, new)
    whole = [program.to_text(regions=True, **_CANONICAL) for program in (old, new)]
    return "only the bodies of regions differ: pass regions=True to see how\n" if diff_texts(*whole) else ""


def _of_complete_texts(old: Program, new: Program) -> str:
    bare = [program.evolve(remarks=(), optimizer_groups={}).to_text(complete=True) for program in (old, new)]
    return diff_texts(*(re.sub(r"(?m)^    at\(.*\n", "", text) for text in bare))


def diff_files(old: Path, new: Path) -> str:
    """The differences of two saved or printed programs; empty if there are none.

    Two saved programs are compared with bodies of regions. Against a printed program, only its printed parts are
    compared.
    """
    loaded = [_load(path) for path in (old, new)]
    forms = [_form_of(program) for program in loaded if isinstance(program, str)]
    form = forms[0] if forms else {"regions": True, **_CANONICAL}
    texts = [
        content if isinstance(content, str) else printed(content, path, **form)
        for content, path in zip(loaded, (old, new), strict=True)
    ]
    differences = diff_texts(*texts)
    if differences or forms:
        return differences
    return _of_complete_texts(*(program for program in loaded if isinstance(program, Program)))


def diff_texts(old: str, new: str) -> str:
    """A unified diff of two printed programs, of any stage; empty without differences.

    Args:
        old: a text from `Program.to_text`.
        new: a text printed with the same options.
    """
    for name, text in (("old", old), ("new", new)):
        if not text.startswith(_FIRST_LINE):
            raise ValueError(
                f"MC7104: the {name} text cannot be compared: line 1 is {text.partition(chr(10))[0][:60]!r}, "
                f"not '{_FIRST_LINE}...'"
            )
        if text.endswith("# the program is as before\n"):
            raise ValueError(
                f"MC7104: the {name} text cannot be compared: this pass has changed nothing, so that its dump ends there: "
                "give that of the pass before"
            )
    if old == new:
        return ""
    parts = [_parts(old), _parts(new)]
    names = list(dict.fromkeys([*parts[0], *parts[1]]))
    pairs = [(name, parts[0].get(name, _Part()), parts[1].get(name, _Part())) for name in names]
    pairs = [(name, old_part, new_part) for name, old_part, new_part in pairs if old_part.lines != new_part.lines]
    if not pairs:
        return ""
    shown = ["--- old", "+++ new"]
    for name, old_part, new_part in pairs:
        if len(shown) < _MOST_LINES:
            shown += _hunks(name, old_part, new_part)
    num_shown = sum(line.startswith(("-", "+")) for line in shown[2:_MOST_LINES])
    left_out = sum(_num_differing(old_part, new_part) for _, old_part, new_part in pairs) - num_shown
    if len(shown) > _MOST_LINES or left_out > 0:
        rest = f"{left_out} more lines that differ" if left_out > 0 else "more lines, in another order,"
        shown = [*shown[:_MOST_LINES], f"... and {rest} are left out here"]
    return "\n".join(shown) + "\n"


@dataclass
class _Part:
    """The top of a text, a bucket, a function or a region. ``numbers`` are line numbers of the text."""

    lines: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def add(self, line: str, number: int) -> None:
        self.lines.append(line)
        self.numbers.append(number)


def _parts(text: str) -> dict[str, _Part]:
    parts: dict[str, _Part] = {"": _Part()}
    part, above = parts[""], _Part()  # above: lines from an empty line to a function, part of the function
    is_above = False
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        begins = _BEGINS_PART.match(line)
        if begins is not None:
            name = begins[1] or begins[2] or begins[3]
            while name in parts:
                name += "'"
            part = parts[name] = above if begins[2] else _Part()
        elif line.startswith("# ") and not line.startswith("#  ") and not is_above:
            part = parts[""]  # a remark or an optimizer, below the last bucket
        is_above = not line or (is_above and line.startswith("# "))
        if not line:
            above = _Part()
        elif number == 1:
            part.add(_MEASURED.sub("", line), number)
        elif not _OF_THE_PASS.match(line) and not _is_source(line):
            (above if is_above else part).add(line, number)
    return parts


def _is_source(line: str) -> bool:
    return line.startswith("    # ") and not line.startswith("    # -- ")


def _num_differing(old_part: _Part, new_part: _Part) -> int:
    counts = [Counter(part.lines) for part in (old_part, new_part)]
    return (counts[0] - counts[1]).total() + (counts[1] - counts[0]).total()


def _hunks(name: str, old_part: _Part, new_part: _Part) -> Iterator[str]:
    limit = min(len(old_part.lines), len(new_part.lines))
    start = next((i for i in range(limit) if old_part.lines[i] != new_part.lines[i]), limit)
    end = next((i for i in range(limit - start) if old_part.lines[-1 - i] != new_part.lines[-1 - i]), limit - start)
    first, after = max(0, start - _CONTEXT), max(0, end - _CONTEXT)
    before, now = (part.lines[first : min(len(part.lines) - after, first + _COMPARED)] for part in (old_part, new_part))
    for group in difflib.SequenceMatcher(None, before, now).get_grouped_opcodes(_CONTEXT):
        spans = (group[0][1], group[-1][2]), (group[0][3], group[-1][4])
        yield f"@@ -{_span(old_part, first, *spans[0])} +{_span(new_part, first, *spans[1])} @@ {name}".rstrip()
        for kind, i, j, k, m in group:
            if kind == "equal":
                yield from (f" {line}" for line in before[i:j])
            else:
                yield from (f"-{line}" for line in before[i:j])
                yield from (f"+{line}" for line in now[k:m])


def _span(part: _Part, first: int, start: int, stop: int) -> str:
    numbers = part.numbers[first + start :] or part.numbers[-1:] or [0]
    return f"{numbers[0]},{stop - start}"


def _load(path: Path) -> Program | str:
    if str(path) == "-":
        return Program.load(path)
    with path.open("rb") as file:
        beginning = file.read(4096).split(b"\n")
    is_printed = beginning[0].startswith(b"# ") and not b"".join(beginning[1:2]).startswith(b"# complete form ")
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
        "sources": any(_is_source(line) for line in lines),
        "fold": any(_is_folded(line) for line in lines),
    }


def _is_folded(line: str) -> bool:
    return is_mark(line) or ", but for these lines" in line or _SEVERAL_DEVICES.match(line) is not None
