"""The table of buckets in an explanation."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from mirrorc.ir.links import link_named
from mirrorc.printing.printed_values import size_text
from mirrorc.runtime.profiling.accounting import apportioned
from mirrorc.runtime.profiling.figures import BucketTimes, added_up, by_kind_and_bucket
from mirrorc.runtime.profiling.rounding import Rounding

MODEL, ALL = "model", "all"  # rows besides those of buckets
_MOMENTS = ("ready", "launched", "waited", "finished")
_DURATIONS = ("hidden", "exposed", "skew", "transfer")
_INDENT = "  "


def bucket_rows(
    buckets: Sequence[BucketTimes],
    meetings_ms: float,
    skew_units: int,
    transfer_units: int,
    rounding: Rounding,
    width: int,
) -> list[str]:
    """Rows for each bucket and its messages or packs, and for the sum: the step's skew and transfer.

    Args:
        meetings_ms: waits of the model's collectives.
        skew_units, transfer_units: of the step, as printed.
        width: of lines of text.
    """
    groups = by_kind_and_bucket(buckets)
    totals = [added_up(group) for group in groups]
    rows = _Rows(rounding, max([6, *(len(_INDENT) + len(bucket.label) for group in groups for bucket in group)]))
    skews = apportioned([total.skew_ms for total in totals], skew_units)
    *transfers, of_model = apportioned([*(total.transfer_ms for total in totals), meetings_ms], transfer_units)
    lines = [rows.heading()]
    heading = ""
    for group, total, skew, transfer in zip(groups, totals, skews, transfers, strict=True):
        kind = f"{total.kind} over {total.link}, ms" if total.link else "not communicated, ms"
        lines += [kind] if kind != heading else []
        heading = kind
        lines.append(rows.row(total, skew, transfer))
        if len(group) > 1:
            lines += rows.parts(group, skew, transfer)
    if of_model:
        lines.append(rows.sum(MODEL, None, 0, of_model))
    if len(lines) > 3 and any(total.link for total in totals):
        hidden = [total.hidden_ms for total in totals if _moves_by_itself(total)]
        lines.append(rows.sum(ALL, sum(hidden) if hidden else None, skew_units, transfer_units))
    return [*lines, *_compressed_lines(buckets, width)]


def _moves_by_itself(bucket: BucketTimes) -> bool:
    return bool(bucket.link) and link_named(bucket.link).moves_by_itself


class _Rows:
    def __init__(self, rounding: Rounding, width: int) -> None:
        self._rounding, self._width = rounding, width

    def heading(self) -> str:
        return f"{'bucket':<{self._width}}{'size':>10}{cells((*_MOMENTS, *_DURATIONS))}  behind"

    def row(self, bucket: BucketTimes, skew_units: int, transfer_units: int, indent: str = "") -> str:
        moments = [self._rounding.text(getattr(bucket, f"{moment}_ms")) for moment in _MOMENTS]
        durations = self._durations(bucket.hidden_ms if _moves_by_itself(bucket) else None, skew_units, transfer_units)
        label = f"{indent + bucket.label:<{self._width}}{size_text(bucket.num_bytes):>10}"
        return f"{label}{cells((*moments, *durations))}  {bucket.behind}".rstrip()

    def parts(self, parts: Sequence[BucketTimes], skew_units: int, transfer_units: int) -> Iterator[str]:
        skews = apportioned([part.skew_ms for part in parts], skew_units)
        transfers = apportioned([part.transfer_ms for part in parts], transfer_units)
        for part, skew, transfer in zip(parts, skews, transfers, strict=True):
            yield self.row(part, skew, transfer, _INDENT)

    def sum(self, name: str, hidden_ms: float | None, skew_units: int, transfer_units: int) -> str:
        durations = self._durations(hidden_ms, skew_units, transfer_units)
        return f"{name:<{self._width}}{'':>10}{cells([''] * len(_MOMENTS))}{cells(durations)}"

    def _durations(self, hidden_ms: float | None, skew_units: int, transfer_units: int) -> list[str]:
        hidden = "-" if hidden_ms is None else self._rounding.text(hidden_ms)
        return [hidden, *map(self._rounding.text_of, (skew_units + transfer_units, skew_units, transfer_units))]


def _compressed_lines(buckets: Sequence[BucketTimes], width: int) -> list[str]:
    sizes = {
        bucket.label: (bucket.num_bytes, bucket.uncompressed_bytes)
        for bucket in buckets
        if bucket.uncompressed_bytes is not None
    }
    if not sizes:
        return []
    savings = {label: f"{size_text(sent)} in place of {size_text(whole)}" for label, (sent, whole) in sizes.items()}
    total = " in place of ".join(size_text(sum(each)) for each in zip(*sizes.values(), strict=True))
    each = [f"; {label} {text}" for label, text in savings.items()] if len(savings) > 1 else []
    return textwrap.wrap(f"compressed: each worker gives {total}{''.join(each)}", width, subsequent_indent="  ")


def cells(texts: Iterable[str]) -> str:
    return "".join(f"{text:>9}" for text in texts)
