"""Reads the printed table of buckets."""

from __future__ import annotations

import re

from mirrorc.ir.variables import Placement
from mirrorc.printing.bucket_table import PLANNED, SENT_AS_FACTORS
from mirrorc.printing.printed_program import PrintedBucket, PrintedGradient
from mirrorc.printing.text_cursor import TextCursor

_BUCKET = re.compile(
    r"# bucket (?P<index>\d+)  (?P<dtype>\S+) +(?P<size>\d+(?:\.\d+)? [KMGT]?i?B)  (?P<count>\d+) gradients?  (?P<rule>\S.*)"
)
_READY = re.compile(r"ready after d\((?P<gradient>.*)\) in (?P<region>\S+)")
_PLACEMENTS = {placement.value.in_table: placement for placement in Placement if not placement.value.has_owner}
_WITH_OWNER = {placement.value.in_table: placement for placement in Placement if placement.value.has_owner}
_OWNER = re.compile(rf"(?P<how>{'|'.join([PLANNED, *_WITH_OWNER])}) (?P<device>\S+)")
_LISTED = "#     "  # the beginning of the line of a single gradient, if gradients are not grouped by layers
_INDENT = "#   "
_MORE = "#       "
_SHARES = "#   shares, "
_PACKS = "#   packs, "
_LAYERS = re.compile(r"(?P<path>(?:[A-Za-z_]\w*\.)+)(?P<first>\d+)(?: … (?P=path)(?P<last>\d+))?: (?P<rest>.*)")
_GRADIENT = re.compile(r"(?P<variable>.+?)(?P<shape>\[(?:\d+(?:, \d+)*)?\])(?: |$)")


def read_buckets(text: TextCursor, number: int) -> tuple[PrintedBucket, ...]:
    """Reads a table, which must have ``number`` buckets; raises as `TextCursor.fail` does."""
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
    """What stands behind the beginning of a line, and on the lines that go on with it; empty if there is no such line."""
    found = text.take().removeprefix(beginning) if text.next.startswith(beginning) else ""
    while found and text.next.startswith(_MORE):
        found += " " + text.take().removeprefix(_MORE)
    return found


def _gradients(text: TextCursor, count: int) -> list[PrintedGradient]:
    """Reads the gradients of a bucket: each on a line of its own, or grouped by layers."""
    found: list[PrintedGradient] = []
    while text.next.startswith(_INDENT) and not text.next.startswith((_PACKS, _SHARES)) and len(found) < count:
        line = text.take()
        if line.startswith(_LISTED):
            found += _listed(text, line.removeprefix(_LISTED))
            continue
        line = line.removeprefix(_INDENT)
        while text.next.startswith(_MORE):
            line += " " + text.take().removeprefix(_MORE)
        layers = _LAYERS.fullmatch(line)
        if layers is None:
            found += _listed(text, line)
            continue
        first, last = int(layers["first"]), int(layers["last"] or layers["first"])
        for layer in range(first, last + 1) if last >= first else range(first, last - 1, -1):
            own = _listed(text, layers["rest"])
            found += [
                PrintedGradient(f"{layers['path']}{layer}.{gradient.variable}", gradient.shape) for gradient in own
            ]
    return found


def _listed(text: TextCursor, line: str) -> list[PrintedGradient]:
    found, place = [], 0
    while place < len(line):
        gradient = _GRADIENT.match(line, place)
        if gradient is None:
            text.fail("gradients, 'VARIABLE[SHAPE]'")
        found.append(PrintedGradient(gradient["variable"], gradient["shape"]))
        place = gradient.end()
    return found
