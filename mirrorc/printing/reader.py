"""Reads the printed form of a program, whose grammar is in `mirrorc.printing.program_text`, back into its parts."""

from __future__ import annotations

import re
from typing import NoReturn

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

_HEADING = re.compile(
    r"# mirrorc(?: · after (?P<after>.+?))? · stage (?P<stage>[A-Z]+) · (?P<devices>\d+) devices? · (?P<buckets>\d+) buckets?"
    r"(?: · (?P<milliseconds>\d+(?:\.\d+)?) ms)?"
)
_BUCKET = re.compile(
    r"# bucket (?P<index>\d+)  (?P<dtype>\S+) +(?P<size>\d+(?:\.\d+)? [KMGT]?i?B)  "
    r"(?:(?P<count>\d+) gradients?|(?P<listed>.+?\]))  (?P<rule>\S.*)"
)
_GRADIENT = re.compile(r"(?P<variable>.+?)(?P<shape>\[(?:\d+(?:, \d+)*)?\])(?: |$)")
_MORE = re.compile(r"… (\d+) more … ")
_OPENING = re.compile(r"(?P<kind>def|region) (?P<name>\w+)\((?P<arguments>.*)\):(?:  # (?P<comment>.*))?")
_COLUMN = re.compile(r"(?P<device>\S+) +\| (?P<rest>.*)")
_LINE = re.compile(r"(?:(?P<outcome>.*?) = )?(?P<call>(?P<operation>[A-Za-z_][\w.]*)\((?P<inside>.*)\)) *")
_TYPE = re.compile(r"(?:pending |share of )*(?:\w+\[(?:\d+(?:, \d+)*)?\]|\(.*\)|\w+)")
_FUNCTION_OF_DEVICE = re.compile(r"(cpu|cuda)_(\d+)(?:_(\d+))?")
_ALSO_RUN_BY = re.compile(r"(\S+) runs the same as replica \d+")
_USERS = "will run on "
_AS_BEFORE = "the program is as before"
_REPORT = re.compile(rf"# (?:\d+ nodes.*|remark of this pass: .*|{_AS_BEFORE})")  # what a dump says of a pass
_INDENT = "    "
_SHOWN = 300  # so much of a line is quoted


def read_program_text(text: str) -> PrintedProgram:
    """Reads a printed program of any stage, with or without full lists of gradients, source lines and bodies of regions.

    Raises:
        TypeError: ``text`` is no string.
        ValueError: the text is not a printed program; says which line, what it is, and what was expected there.
    """
    if not isinstance(text, str):
        raise TypeError(f"the text of a program is a {type(text).__name__}: give a str, such as program.to_text()")
    return _Reader(text).program()


class _Reader:
    """Goes through the lines of a text, once."""

    def __init__(self, text: str) -> None:
        self.lines = text.removesuffix("\n").split("\n")
        self.number = 0  # of the line that was taken last; the first is 1

    def program(self) -> PrintedProgram:
        heading = self.match(_HEADING, self.take(), "the heading '# mirrorc · stage STAGE · N devices · N buckets'")
        report = []
        while _REPORT.fullmatch(self.next):
            report.append(self.take().removeprefix("# "))
        self.expect(_AS_BEFORE not in report, "the program; this dump says that the pass before has left the same one")
        buckets = self.buckets(int(heading["buckets"]))
        remarks = []
        while self.next.startswith("# remark: "):
            remarks.append(self.take().removeprefix("# remark: "))
        functions: list[PrintedFunction] = []
        regions: dict[str, PrintedRegion] = {}
        while self.number < len(self.lines) or not functions:
            self.expect(not self.take(), "a bucket, a remark, or an empty line and then a function or region")
            opening = self.match(
                _OPENING, self.take(), "'def DEVICE(NAME: TYPE, ...):' or 'region NAME(NAME: TYPE, ...):'"
            )
            if opening["kind"] == "def":
                self.expect(not regions, "a region: functions come before all regions")
                functions.append(self.function(opening))
            else:
                self.expect(opening["name"] not in regions, "a region of another name: there is one of this name")
                self.expect(bool(functions), "a function before all regions")
                regions[opening["name"]] = self.region(opening)
        return PrintedProgram(
            stage=heading["stage"],
            num_devices=int(heading["devices"]),
            after=heading["after"] or "",
            milliseconds=float(heading["milliseconds"]) if heading["milliseconds"] else None,
            report=tuple(report),
            buckets=buckets,
            remarks=tuple(remarks),
            functions=tuple(functions),
            regions=regions,
        )

    @property
    def next(self) -> str:
        """The line that will be taken next; empty at the end."""
        return self.lines[self.number] if self.number < len(self.lines) else ""

    def take(self) -> str:
        if self.number == len(self.lines):
            raise ValueError(
                f"the printed program is cut off: line {self.number}, {self.lines[-1][:_SHOWN]!r}, is its last, where a "
                "function or region must end with 'return ...'; print it anew with program.to_text()"
            )
        self.number += 1
        return self.lines[self.number - 1]

    def fail(self, expected: str) -> NoReturn:
        raise ValueError(
            f"this is no printed program: line {self.number} is {self.lines[self.number - 1][:_SHOWN]!r}, where this was "
            f"expected: {expected}; the whole form is in the docstring of mirrorc.printing.program_text, print it anew with "
            "program.to_text()"
        )

    def expect(self, holds: bool, expected: str) -> None:
        if not holds:
            self.fail(expected)

    def match(self, pattern: re.Pattern[str], text: str, expected: str) -> re.Match[str]:
        match = pattern.fullmatch(text)
        if match is None:
            self.fail(expected)
        return match

    def buckets(self, number: int) -> tuple[PrintedBucket, ...]:
        buckets = []
        while self.next.startswith("# bucket "):
            buckets.append(self.bucket())
        self.expect(
            len(buckets) == number, f"{number} buckets up to here, as the heading says; there are {len(buckets)}"
        )
        return tuple(buckets)

    def bucket(self) -> PrintedBucket:
        row = self.match(_BUCKET, self.take(), "'# bucket INDEX  DTYPE  SIZE  GRADIENTS  RULE'")
        rule, *facts = row["rule"].split(" · ")
        ready = [fact.removeprefix("ready after ") for fact in facts if fact.startswith("ready after ")]
        self.expect(len(ready) + ("shared" in facts) == len(facts), "'RULE · shared · ready after REGION' at the end")
        number, gradients = self.number, []
        if row["count"]:
            for _ in range(int(row["count"])):
                line = self.take()
                self.expect(line.startswith("#     "), f"one of {row['count']} gradients, '#     VARIABLE[SHAPE]'")
                gradients += self.gradients(line.removeprefix("#     "))[0]
            num_gradients = len(gradients)
        else:
            gradients, num_gradients = self.gradients(row["listed"])
        return PrintedBucket(
            number=number,
            index=int(row["index"]),
            dtype=row["dtype"],
            size=row["size"],
            num_gradients=num_gradients,
            gradients=tuple(gradients),
            rule=rule,
            is_shared="shared" in facts,
            ready_after="".join(ready),
        )

    def gradients(self, listed: str) -> tuple[list[PrintedGradient], int]:
        """The gradients of a list, and how many there are with those that it only counts."""
        found, more, place = [], 0, 0
        while place < len(listed):
            if skipped := _MORE.match(listed, place):
                more, place = more + int(skipped[1]), skipped.end()
                continue
            gradient = _GRADIENT.match(listed, place)
            if gradient is None:
                self.fail("gradients, 'VARIABLE[SHAPE]'")
            found.append(PrintedGradient(gradient["variable"], gradient["shape"]))
            place = gradient.end()
        return found, len(found) + more

    def function(self, opening: re.Match[str]) -> PrintedFunction:
        start, name, comment = self.number, opening["name"], opening["comment"] or ""
        arguments = self.signature(opening["arguments"])
        lines, outcome = self.body(has_column=name == "all_devices", has_comments=True)
        if name == "all_devices":
            devices = tuple(dict.fromkeys(line.device for line in lines if line.device != "all"))
        elif name == "one_device":
            devices = tuple(comment.removeprefix(_USERS).split(", ")) if comment.startswith(_USERS) else ()
        else:
            devices = (_device_of(name), *_ALSO_RUN_BY.findall(comment))
        return PrintedFunction(start, name, devices, arguments, lines, outcome, comment)

    def region(self, opening: re.Match[str]) -> PrintedRegion:
        start, name = self.number, opening["name"]
        arguments = self.signature(opening["arguments"])
        statements, outcome = self.body(has_column=False, has_comments=False)
        self.expect(outcome[:1] + outcome[-1:] == "[]", "'return [NAME, ...]'")
        return PrintedRegion(start, name, arguments, statements, split_list(outcome[1:-1]))

    def signature(self, text: str) -> tuple[PrintedValue, ...]:
        arguments = tuple(as_value(part) for part in split_list(text))
        self.expect(all(_TYPE.fullmatch(value.type) for value in arguments), "a type of every argument, 'NAME: TYPE'")
        return arguments

    def body(self, *, has_column: bool, has_comments: bool) -> tuple[tuple[PrintedLine, ...], str]:
        """The lines up to 'return', and what that gives. Lines that say no more than the user's source are left out."""
        lines: list[PrintedLine] = []
        while True:
            text = self.take()
            self.expect(text.startswith(_INDENT), "a line of a body, four columns in, or 'return ...' at its end")
            text = text.removeprefix(_INDENT)
            if text.startswith("return "):
                return tuple(lines), text.removeprefix("return ")
            if not text.startswith("# "):
                lines.append(self.line(text, has_column, has_comments))

    def line(self, text: str, has_column: bool, has_comments: bool) -> PrintedLine:
        device = comment = ""
        if has_column:
            column = self.match(_COLUMN, text, "'DEVICE | VALUE, ... = OPERATION(ARGUMENT, ...)'")
            device, text = column["device"], column["rest"]
        if has_comments:
            text, _, comment = text.partition("  # ")
        parts = self.match(_LINE, text, "'VALUE, ... = OPERATION(ARGUMENT, ...)'")
        outcome = (parts["outcome"] or "").rstrip()
        line = PrintedLine(
            number=self.number,
            text=f"{outcome} = {parts['call']}" if outcome else parts["call"],
            device=device,
            outcome="" if outcome == "_" else outcome,
            operation=parts["operation"],
            inside=parts["inside"],
            comment=comment,
        )
        if has_comments:  # in bodies of regions, which may be huge, types are not looked at
            typed = [value for value in line.results if value.type]
            self.expect(all(_TYPE.fullmatch(value.type) for value in typed), "types such as 'f32[2, 3]' after results")
        return line


def _device_of(name: str) -> str:
    """The device after which a function is named: ``cpu_0`` is ``cpu:0``, ``cuda_0_1`` is ``cuda:0/1``."""
    match = _FUNCTION_OF_DEVICE.fullmatch(name)
    if match is None:
        return name
    return f"{match[1]}:{match[2]}" + (f"/{match[3]}" if match[3] else "")
