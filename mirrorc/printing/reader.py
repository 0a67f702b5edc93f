"""Reads the printed form of a program; its grammar is in `mirrorc.printing.program_text`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

from mirrorc.ir.variables import Placement
from mirrorc.messages.problem import problem
from mirrorc.printing.bucket_table import PLANNED, SENT_AS_FACTORS
from mirrorc.printing.folding import unfolded
from mirrorc.printing.function_text import EACH, operation_of
from mirrorc.printing.printed_program import (
    PrintedBucket,
    PrintedFunction,
    PrintedGradient,
    PrintedLine,
    PrintedProgram,
    PrintedRegion,
    PrintedValue,
    as_value,
    split_list,
)
from mirrorc.printing.spans import read_spans

_BUCKET = re.compile(
    r"# bucket (?P<index>\d+)  (?P<dtype>\S+) +(?P<size>\d+(?:\.\d+)? [KMGT]?i?B)  (?P<count>\d+) gradients?  (?P<rule>\S.*)"
)
_READY = re.compile(r"ready after d\((?P<gradient>.*)\) in (?P<region>\S+)")
_PLACEMENTS = {placement.value.in_table: placement for placement in Placement if not placement.value.has_owner}
_WITH_OWNER = {placement.value.in_table: placement for placement in Placement if placement.value.has_owner}
_OWNER = re.compile(rf"(?P<how>{'|'.join([PLANNED, *_WITH_OWNER])}) (?P<device>\S+)")
_LISTED = "#     "  # the beginning of the line of a single gradient, if gradients are not grouped by layers
_ROW_INDENT = "#   "
_MORE = "#       "
_SHARES = "#   shares, "
_PACKS = "#   packs, "
_LAYERS = re.compile(r"(?P<path>(?:[A-Za-z_]\w*\.)+)(?P<first>\d+)(?: … (?P=path)(?P<last>\d+))?: (?P<rest>.*)")
_GRADIENT = re.compile(r"(?P<variable>.+?)(?P<shape>\[(?:\d+(?:, \d+)*)?\])(?: |$)")


def read_buckets(text: TextCursor, number: int) -> tuple[PrintedBucket, ...]:
    buckets = []
    while text.next.startswith("# bucket "):
        buckets.append(_bucket(text))
    text.expect(len(buckets) == number, f"{number} buckets up to here, as the heading says; there are {len(buckets)}")
    return tuple(buckets)


def _bucket(text: TextCursor) -> PrintedBucket:
    row = text.match(_BUCKET, text.take(), "'# bucket INDEX  DTYPE  SIZE  N gradients  RULE'")
    number, count = text.number, int(row["count"])
    rule, *facts = row["rule"].split(" · ")
    ready = [match for fact in facts if (match := _READY.fullmatch(fact))]
    placements = dict.fromkeys(fact for fact in facts if fact and fact in _PLACEMENTS)
    owners = [match for fact in facts if (match := _OWNER.fullmatch(fact))]
    placements |= {owner["how"]: None for owner in owners if owner["how"] in _WITH_OWNER}
    sent = [fact for fact in facts if fact == SENT_AS_FACTORS]
    named = " or ".join([*filter(None, _PLACEMENTS), *(f"{word} DEVICE" for word in (PLANNED, *_WITH_OWNER))])
    expected = f"'RULE · {named} · {SENT_AS_FACTORS} · ready after d(VARIABLE) in REGION' at the end"
    num_known = len(ready) + len(placements) + sum(owner["how"] == PLANNED for owner in owners) + len(sent)
    text.expect(len(placements) <= 1 and len(owners) <= 1 and num_known == len(facts), expected)
    gradients = _gradients(text, count)
    text.expect(
        len(gradients) == count, f"{count} gradients up to here, '#     VARIABLE[SHAPE]'; there are {len(gradients)}"
    )
    packs, shares = (_listing(text, beginning) for beginning in (_PACKS, _SHARES))
    return PrintedBucket(
        number=number,
        index=int(row["index"]),
        dtype=row["dtype"],
        size=row["size"],
        num_gradients=count,
        gradients=tuple(gradients),
        rule=rule,
        placement=(_PLACEMENTS | _WITH_OWNER)[next(iter(placements), "")],
        owner=owners[0]["device"] if owners else "",
        is_sent_as_factors=bool(sent),
        ready_after=ready[0]["region"] if ready else "",
        last_gradient=ready[0]["gradient"] if ready else "",
        shares=shares,
        packs=packs,
    )


def _listing(text: TextCursor, beginning: str) -> str:
    listing = text.take().removeprefix(beginning) if text.next.startswith(beginning) else ""
    while listing and text.next.startswith(_MORE):
        listing += " " + text.take().removeprefix(_MORE)
    return listing


def _gradients(text: TextCursor, count: int) -> list[PrintedGradient]:
    gradients: list[PrintedGradient] = []
    while text.next.startswith(_ROW_INDENT) and not text.next.startswith((_PACKS, _SHARES)) and len(gradients) < count:
        line = text.take()
        if line.startswith(_LISTED):
            gradients += _listed(text, line.removeprefix(_LISTED))
            continue
        line = line.removeprefix(_ROW_INDENT)
        while text.next.startswith(_MORE):
            line += " " + text.take().removeprefix(_MORE)
        layers = _LAYERS.fullmatch(line)
        if layers is None:
            gradients += _listed(text, line)
            continue
        first, last = int(layers["first"]), int(layers["last"] or layers["first"])
        for layer in range(first, last + 1) if last >= first else range(first, last - 1, -1):
            members = _listed(text, layers["rest"])
            gradients += [
                PrintedGradient(f"{layers['path']}{layer}.{gradient.variable}", gradient.shape) for gradient in members
            ]
    return gradients


def _listed(text: TextCursor, line: str) -> list[PrintedGradient]:
    gradients, place = [], 0
    while place < len(line):
        gradient = _GRADIENT.match(line, place)
        if gradient is None:
            text.fail("gradients, 'VARIABLE[SHAPE]'")
        gradients.append(PrintedGradient(gradient["variable"], gradient["shape"]))
        place = gradient.end()
    return gradients


_SHOWN = 300  # the most characters of a line that are quoted
_ANEW = "print it anew with program.to_text()"


class TextCursor:
    """Reads unfolded lines one by one."""

    def __init__(self, text: str) -> None:
        self._lines = unfolded(text.removesuffix("\n").split("\n"))
        self._taken = 0

    @property
    def number(self) -> int:
        """The number of the line read last, from 1; 0 at the beginning."""
        return self._lines[self._taken - 1][0] if self._taken else 0

    @property
    def is_at_end(self) -> bool:
        return self._taken == len(self._lines)

    @property
    def next(self) -> str:
        """The next line, without reading it; empty at the end."""
        return "" if self.is_at_end else self._lines[self._taken][1]

    def take(self) -> str:
        """Raises ``ValueError`` at the end."""
        if self.is_at_end:
            raise problem(
                ValueError,
                f"MC7104: the printed program is cut off after line {self.number}, {self._lines[-1][1][:_SHOWN]!r}",
                "a function or region ends with 'return ...'",
                _ANEW,
            )
        self._taken += 1
        return self._lines[self._taken - 1][1]

    def fail(self, expected: str) -> NoReturn:
        raise problem(
            ValueError,
            f"MC7104: this is no printed program: line {self.number} is {self._lines[self._taken - 1][1][:_SHOWN]!r}",
            f"expected was {expected}; the docstring of mirrorc.printing.program_text has the whole form",
            _ANEW,
        )

    def expect(self, holds: bool, expected: str) -> None:
        if not holds:
            self.fail(expected)

    def match(self, pattern: re.Pattern[str], text: str, expected: str) -> re.Match[str]:
        match = pattern.fullmatch(text)
        if match is None:
            self.fail(expected)
        return match


_HEADING = re.compile(
    r"# mirrorc(?: · after (?P<after>.+?))? · stage (?P<stage>[A-Z]+) · (?P<devices>\d+) devices?"
    r" · (?:(?P<buckets>\d+) buckets?|evaluation)(?: · (?P<accumulation>accumulating|after accumulation))?"
    r"(?: · (?P<worker>worker \d+ of \d+, replicas? [\d …]+ of \d+))?"
    r"(?: · (?P<milliseconds>\d+(?:\.\d+)?) ms)?"
)
_OPENING = re.compile(r"(?P<kind>def|region) (?P<name>[\w.]+)\((?P<arguments>.*)\):(?:  # (?P<comment>.*))?")
_WHO = re.compile(r"# (?P<devices>\S.*) \(replicas? (?P<replicas>[\d, …]+)\) runs? this(?: on (?P<examples>.*))?")
_COLUMN = re.compile(r"(?P<devices>\S.*?) +\| (?P<rest>.*)")
_LINE = re.compile(r"(?:(?P<outcome>.*?) = )?(?P<call>(?P<operation>[A-Za-z_][\w.]*)\((?P<inside>.*)\)) *")
_SIZES = r"(?:\d+(?:, \d+)*)?|(?=[^\]]*s\d)[^\[\]]+"  # numbers, or expressions with symbols: s0, 2*s0 + 1
_TYPE = re.compile(rf"(?:pending |share of )*(?:\w+\[(?:{_SIZES})\]|\(.*\)|\w+)")
_AS_OTHER = re.compile(r"as (?P<name>\w+), but for these lines(; .*)?")
_AS_BEFORE = "the program is as before"
_REPORT = re.compile(rf"# (?:\d+ nodes.*|remark of this pass: .*|{_AS_BEFORE})")  # what a dump says of a pass
_WORKERS = re.compile(r"# workers: .+")
_OPTIMIZER = "# optimizer "
_REMARK = "# remark: "
_INDENT = "    "
_WHY = "# -- "
_MIRRORED = "all_devices"


def read_program_text(text: str) -> PrintedProgram:
    """Reads a printed program of any stage, in any form.

    Raises:
        TypeError: ``text`` is not a string.
        ValueError: the text is not a printed program.
    """
    if not isinstance(text, str):
        raise TypeError(
            f"MC7104: the text of a program is a {type(text).__name__}: give a str, such as program.to_text()"
        )
    cursor = TextCursor(text)
    heading = cursor.match(_HEADING, cursor.take(), "the heading '# mirrorc · stage STAGE · N devices · N buckets'")
    report = [line.removeprefix("# ") for line in _while_matching(cursor, _REPORT)]
    cursor.expect(_AS_BEFORE not in report, "the program; this dump says that the pass before has left the same one")
    workers = "".join(_while_matching(cursor, _WORKERS)).removeprefix("# workers: ")
    cursor.expect(
        bool(workers) == bool(heading["worker"]), "'# workers: TEXT' where the heading names a worker, and only there"
    )
    buckets = read_buckets(cursor, int(heading["buckets"] or 0))
    optimizers, remarks = (tuple(_while_beginning(cursor, start)) for start in (_OPTIMIZER, _REMARK))
    functions, regions = _functions_and_regions(cursor)
    return PrintedProgram(
        stage=heading["stage"],
        num_devices=int(heading["devices"]),
        is_evaluation=heading["buckets"] is None,
        accumulation=heading["accumulation"] or "",
        worker=heading["worker"] or "",
        workers=workers,
        after=heading["after"] or "",
        milliseconds=float(heading["milliseconds"]) if heading["milliseconds"] else None,
        report=tuple(report),
        buckets=buckets,
        optimizers=optimizers,
        remarks=remarks,
        functions=functions,
        regions=regions,
    )


def _while_matching(cursor: TextCursor, pattern: re.Pattern[str]) -> Iterator[str]:
    while pattern.fullmatch(cursor.next):
        yield cursor.take()


def _while_beginning(cursor: TextCursor, start: str) -> Iterator[str]:
    while cursor.next.startswith(start):
        yield cursor.take().removeprefix(start)


def _functions_and_regions(cursor: TextCursor) -> tuple[tuple[PrintedFunction, ...], dict[str, PrintedRegion]]:
    functions: list[PrintedFunction] = []
    regions: dict[str, PrintedRegion] = {}
    while not cursor.is_at_end or not functions:
        cursor.expect(not cursor.take(), "a bucket, a remark, or an empty line and then a function or region")
        above = tuple(_while_beginning(cursor, "# "))
        opening = cursor.match(
            _OPENING, cursor.take(), "'def NAME(NAME: TYPE, ...):' or 'region NAME(NAME: TYPE, ...):'"
        )
        if opening["kind"] == "def":
            cursor.expect(not regions, "a region: functions come before all regions")
            functions.append(_function(cursor, opening, above, functions))
        else:
            cursor.expect(opening["name"] not in regions, "a region of another name: there is one of this name")
            cursor.expect(bool(functions), "a function before all regions")
            regions[opening["name"]] = _region(cursor, opening)
    return tuple(functions), regions


def _function(
    cursor: TextCursor, opening: re.Match[str], above: Sequence[str], others: Sequence[PrintedFunction]
) -> PrintedFunction:
    start, name, comment = cursor.number, opening["name"], opening["comment"] or ""
    arguments = _signature(cursor, opening["arguments"])
    devices = _devices(above)
    cursor.expect(bool(devices), "above it, '# DEVICE, ... (replicas N, ...) run this'")
    other = _AS_OTHER.fullmatch(comment)
    base = next((function for function in others if other and function.name == other["name"]), None)
    cursor.expect(base is not None or not comment, "'as NAME, but for these lines' of a function above, or nothing")
    lines, explanations, outcome = _body(cursor, has_comments=True, devices=devices if name == _MIRRORED else None)
    if base is not None:
        lines = _in_place_of(cursor, base.lines, lines)
    return PrintedFunction(start, name, devices, arguments, lines, outcome, tuple(above), tuple(explanations))


def _devices(above: Iterable[str]) -> tuple[str, ...]:
    device_of: dict[int, str] = {}
    for line in above:
        if match := _WHO.fullmatch(f"# {line}"):
            replicas = (int(replica) for replica in read_spans(match["replicas"]))
            device_of.update(zip(replicas, read_spans(match["devices"]), strict=False))
    return tuple(device for _, device in sorted(device_of.items()))


def _in_place_of(
    cursor: TextCursor, base: Sequence[PrintedLine], lines: Sequence[PrintedLine]
) -> tuple[PrintedLine, ...]:
    replacements: dict[str, list[PrintedLine]] = defaultdict(list)
    for line in lines:
        replacements[operation_of(line.text)].append(line)
    replaced = []
    for line in base:
        operation = operation_of(line.text)
        cursor.expect(
            operation not in replacements or bool(replacements[operation]),
            f"as many lines of {operation} as in the function that it is like",
        )
        replaced.append(replacements[operation].pop(0) if operation in replacements else line)
    cursor.expect(not any(replacements.values()), "no more lines of an operation than in the function that it is like")
    return tuple(replaced)


def _region(cursor: TextCursor, opening: re.Match[str]) -> PrintedRegion:
    start, name = cursor.number, opening["name"]
    arguments = _signature(cursor, opening["arguments"])
    statements, _, outcome = _body(cursor, has_comments=False)
    cursor.expect(outcome[:1] + outcome[-1:] == "[]", "'return [NAME, ...]'")
    return PrintedRegion(start, name, arguments, statements, split_list(outcome[1:-1]))


def _signature(cursor: TextCursor, text: str) -> tuple[PrintedValue, ...]:
    arguments = tuple(as_value(part) for part in split_list(text))
    cursor.expect(all(_TYPE.fullmatch(value.type) for value in arguments), "a type of every argument, 'NAME: TYPE'")
    return arguments


def _body(
    cursor: TextCursor, *, has_comments: bool, devices: Sequence[str] | None = None
) -> tuple[tuple[PrintedLine, ...], list[str], str]:
    lines: list[PrintedLine] = []
    explanations: list[str] = []
    while True:
        text = cursor.take()
        cursor.expect(text.startswith(_INDENT), "a line of a body, four columns in, or 'return ...' at its end")
        text = text.removeprefix(_INDENT)
        if text.startswith("return "):
            return tuple(lines), explanations, text.removeprefix("return ")
        if text.startswith(_WHY):
            explanations.append(text.removeprefix(_WHY))
        elif not text.startswith("# "):
            owners: Sequence[str] = ("",)
            if devices is not None:
                column = cursor.match(_COLUMN, text, "'DEVICE, ... | VALUE, ... = OPERATION(ARGUMENT, ...)'")
                owners, text = devices if column["devices"] == EACH else read_spans(column["devices"]), column["rest"]
            line = _line(cursor, text, has_comments)
            lines += [replace(line, device=owner) for owner in owners]


def _line(cursor: TextCursor, text: str, has_comments: bool) -> PrintedLine:
    comment = ""
    if has_comments:
        text, _, comment = text.partition("  # ")
    parts = cursor.match(_LINE, text, "'VALUE, ... = OPERATION(ARGUMENT, ...)'")
    outcome = (parts["outcome"] or "").rstrip()
    line = PrintedLine(
        number=cursor.number,
        text=f"{outcome} = {parts['call']}" if outcome else parts["call"],
        device="",
        outcome="" if outcome == "_" else outcome,
        operation=parts["operation"],
        inside=parts["inside"],
        comment=comment,
    )
    if has_comments:  # in bodies of regions, which may be huge, types are not looked at
        typed = [value for value in line.results if value.type]
        cursor.expect(all(_TYPE.fullmatch(value.type) for value in typed), "types such as 'f32[2, 3]' after results")
    return line
