"""Folds the messages of all-reduces: a table of rounds for all devices, and one line in each device's function."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.printing.bucket_names import BucketNames, SentPart
from mirrorc.printing.graph_text import RESULT_WIDTH, Line
from mirrorc.printing.printed_values import spans, type_of
from mirrorc.printing.variants import device_column, wrapped

_TITLE = "by replicas; c0, c1, ... are chunks in order; to_text(fold=False) has each line"
_FEWEST_LINES = 3  # that are folded
_MOST_MESSAGES = 16  # of a round that are listed
_KINDS = {"own": "own gradients", "partial": "partial sums", "sum": "whole sums", "share": "shares of whole sums"}


def message_table(names: BucketNames) -> list[str]:
    """A line for each round; buckets with the same messages share the lines."""
    of_unit: dict[str, list[SentPart]] = {}
    for sent in names.sent:
        of_unit.setdefault(sent.unit, []).append(sent)
    alike: dict[tuple[str, ...], list[str]] = {}
    for unit, messages in of_unit.items():
        rounds = itertools.groupby(sorted(messages, key=lambda sent: sent.route.round), lambda sent: sent.route.round)
        lines = [line for number, of_round in rounds for line in _round_lines(names, number, [*of_round])]
        alike.setdefault(tuple(lines), []).append(unit)
    return [line for lines, units in alike.items() for line in (f"# messages of {spans(units)}, {_TITLE}", *lines)]


def _round_lines(names: BucketNames, number: int, messages: Sequence[SentPart]) -> list[str]:
    kinds = " and ".join(_KINDS[kind] for kind in _KINDS if any(sent.kind == kind for sent in messages))
    parts = []
    for sent in messages:
        what = names.elements_name(sent.unit, sent.elements) + " " if sent.is_chunk else ""
        parts.append(f"{what}{sent.route.source}→{sent.route.destination}")
    more = [f"and {len(parts) - _MOST_MESSAGES} more"] if len(parts) > _MOST_MESSAGES else []
    return wrapped(f"round {number}, {kinds}: ", [*parts[:_MOST_MESSAGES], *more])


def messages_folded(program: Program, names: BucketNames, lines: Sequence[Line]) -> list[Line]:
    """Replaces each stretch of lines with messages of one bucket::

    b0_sum: f32[20480] = … messages of b0, rounds 1 … 3 (13 lines)
    """
    folded: list[Line] = []
    for unit, run in itertools.groupby(lines, lambda line: names.unit(line.node)):
        stretch = list(run)
        is_folded = unit and len(stretch) >= _FEWEST_LINES and any(_round(line.node) is not None for line in stretch)
        folded += [_line(program, names, unit, stretch)] if is_folded else stretch
    return folded


def _line(program: Program, names: BucketNames, unit: str, stretch: Sequence[Line]) -> Line:
    rounds = sorted({number for line in stretch if (number := _round(line.node)) is not None})
    which = f"round{'s' if len(rounds) > 1 else ''} {spans(rounds)}"
    text = f"… messages of {unit}, {which} ({len(stretch)} lines)"
    devices = list(dict.fromkeys(line.device for line in stretch))
    used = [line.node for line in stretch if any(not names.unit(user) for user in line.node.users)]
    if used and devices == [""]:
        results = ", ".join(f"{names.of(node)}: {type_of(node.meta['val'], names.num_shared(node))}" for node in used)
        text = f"{results:<{RESULT_WIDTH}} = {text}"
    above = tuple(explanation for line in stretch for explanation in line.above)
    return Line(text, stretch[0].node, device=device_column(program, devices), above=above)


def _round(node: fx.Node) -> int | None:
    number = node.kwargs.get("round")
    return number if node.target in (ops.send, ops.recv) and isinstance(number, int) else None
