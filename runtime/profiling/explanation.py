"""Explanation of recorded steps, with its table of buckets."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mirrorc.ir.links import link_named
from mirrorc.messages.wording import counted, notebook_html
from mirrorc.printing.printed_values import size_text, spans
from mirrorc.runtime.profiling.accounting import PARTS, Rounding, apportioned
from mirrorc.runtime.profiling.figures import BucketTimes, DeviceTimes, added_up, by_kind_and_bucket
from mirrorc.runtime.profiling.prediction import Prediction

MODEL, ALL = "model", "all"  # rows besides those of buckets
_MOMENTS = ("ready", "launched", "waited", "finished")
_DURATIONS = ("hidden", "exposed", "skew", "transfer")
_INDENT = "  "
FASTEST, SLOWEST = "fastest", "slowest"  # rows besides those of devices
_WIDTH = 110  # of texts; rows of tables may be longer
_NO_BREAK = "\N{NO-BREAK SPACE}"
_BUCKET_COLUMNS = (
    "ready (its last gradient is made), launched, waited (its wait begins) and finished (its wait ends) are moments from the "
    "step's beginning, as means over the devices that take part; means over all devices (0 for one that does not wait) are "
    "hidden (in flight while the device does something else; - where nothing moves before the wait) and exposed (in the wait) = "
    "skew + transfer; behind is what it waited for longest: a call of a device that launched late, or an earlier wait"
)
_MESSAGES = (
    "; of a message, such as 0→1, ready and launched are moments of its sender, waited and finished of its receiver"
)
_ROUNDS = "; r and c are the round of a message, and the chunk of the bucket that is sent"
_PACKS = "; p is the pack of the bucket, of which each is in flight by itself"
_SUMS = "; the line above several is from the first to the last, with their sums"
_MODEL = f"; {MODEL}: waits for collectives of the model itself, such as those of SyncBatchNorm"


@dataclass(frozen=True)
class Explanation:
    """The breakdown of the last recorded steps' time. Its `str` is a table with definitions of the columns.

    All times are means over the middle third of the steps by duration, so parts add up.

    Attributes:
        num_steps: the recorded steps; the program's first one does not count if there are others.
        step_ms: from the start of the first device to the end of the last.
        parts_ms: the parts of step_ms, see `mirrorc.runtime.profiling.accounting.PARTS`, as means over devices.
        hidden_ms: the sum of ``hidden_ms`` over buckets. It may exceed the step, because several buckets may be in
            flight.
        buckets: the collectives, in the order of their launches, and messages, by bucket, round and chunk.
        devices: the devices' times, in order of replicas.
        advice: the change with the largest estimated gain, or the reason why there is none.
        fastest_ms, slowest_ms: the parts of the fastest and slowest step, as means over devices.
        start: describes the part ``start``, and the device that begins last; empty if it takes little.
        prediction: a simulation of the step over several workers; None for a single worker or unknown costs.
        capture: why capture fell back to another front end, and why changing sizes are constants of the program.
    """

    num_steps: int
    step_ms: float
    parts_ms: Mapping[str, float]
    hidden_ms: float
    buckets: tuple[BucketTimes, ...]
    devices: tuple[DeviceTimes, ...]
    advice: str
    fastest_ms: Mapping[str, float]
    slowest_ms: Mapping[str, float]
    start: str = ""
    prediction: Prediction | None = None
    capture: tuple[str, ...] = ()

    @property
    def totals(self) -> tuple[BucketTimes, ...]:
        return tuple(map(added_up, by_kind_and_bucket(self.buckets)))

    @property
    def meetings_ms(self) -> float:
        """Time in waits for the model's collectives, as a mean over devices; part of transfer."""
        return max(0.0, self.exposed_ms - sum(bucket.exposed_ms for bucket in self.buckets))

    @property
    def compute_ms(self) -> float:
        """Time in regions, as a mean over devices."""
        return self.parts_ms["forward"] + self.parts_ms["backward"]

    @property
    def exposed_ms(self) -> float:
        """Time in waits, as a mean over devices."""
        return self.parts_ms["skew"] + self.parts_ms["transfer"]

    @property
    def update_ms(self) -> float:
        """Time in the optimizer and in writing variables, as a mean over devices."""
        return self.parts_ms["update"] + self.parts_ms["write"]

    @property
    def other_ms(self) -> float:
        """Time in starting, packing, launching, and waiting for the last device at the commit and the end; a mean."""
        return sum(self.parts_ms[part] for part in ("start", "pack", "launch", "commit", "other", "end"))

    def __str__(self) -> str:
        rounding = Rounding.for_step(self.step_ms)
        amounts = apportioned(_in_order(self.parts_ms), rounding.units(self.step_ms))
        units = dict(zip(PARTS, amounts, strict=True))
        rows = bucket_rows(self.buckets, self.meetings_ms, units["skew"], units["transfer"], rounding)
        parts = [
            _summary(self, rounding, units),
            rows,
            _device_rows(self, rounding),
            _prediction_rows(self, rounding),
            _definitions(self, has_model_row=any(row.startswith(f"{MODEL} ") for row in rows)),
        ]
        parts = [lines for lines in parts if lines]
        parts += [_wrapped(text) for text in self.capture]
        parts.append(_wrapped(f"advice: {self.advice}"))
        return "\n\n".join("\n".join(lines) for lines in parts)

    def _repr_html_(self) -> str:
        return notebook_html(_heading(self, Rounding.for_step(self.step_ms)), str(self))


def _in_order(parts_ms: Mapping[str, float]) -> list[float]:
    return [parts_ms[part] for part in PARTS]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent="  ")


def _summary(explanation: Explanation, rounding: Rounding, units: Mapping[str, int]) -> list[str]:
    percent = apportioned(_in_order(explanation.parts_ms), 1000)
    shares = [
        f"{part} {rounding.text_of(units[part])} ({tenths / 10:.1f}%)"
        for part, tenths in zip(PARTS, percent, strict=True)
        if units[part] or tenths
    ]
    wrapped = _wrapped(", ".join(share.replace(" ", _NO_BREAK) for share in shares), "  ")
    return [
        textwrap.shorten(_heading(explanation, rounding), _WIDTH),
        *(line.replace(_NO_BREAK, " ") for line in wrapped),
        *_hidden_lines(explanation, rounding),
        *(_wrapped(f"start: {explanation.start}", "  ") if explanation.start else []),
    ]


def _heading(explanation: Explanation, rounding: Rounding) -> str:
    names = spans(device.device for device in explanation.devices)
    steps = counted(explanation.num_steps, "step")
    takes = f"A step takes {rounding.text(explanation.step_ms)} ms"
    if explanation.num_steps == 1:
        return f"{takes}; {steps} on {names}"
    least, most = (rounding.text(sum(parts.values())) for parts in (explanation.fastest_ms, explanation.slowest_ms))
    middle = "the mean of the middle third of" if explanation.num_steps > 2 else "the mean of"
    return f"{takes} ({least} … {most}); {middle} {steps} on {names}"


def _hidden_lines(explanation: Explanation, rounding: Rounding) -> list[str]:
    """Hidden time is not part of the step: several buckets may be in flight at once."""
    links = list(dict.fromkeys(bucket.link for bucket in explanation.buckets if bucket.link))
    idle = [link for link in links if not link_named(link).moves_by_itself]
    reasons = []
    if len(idle) < len(links):
        reasons.append(f"hidden behind other work: {rounding.text(explanation.hidden_ms)} ms, summed over buckets")
    if idle:
        reasons.append(f"{' and '.join(idle)} {'moves' if len(idle) == 1 else 'move'} nothing before the wait")
    return _wrapped("; ".join(reasons), "  ")


def _device_rows(explanation: Explanation, rounding: Rounding) -> list[str]:
    rows = {device.device: device.parts_ms for device in explanation.devices}
    if explanation.num_steps > 1:
        rows |= {FASTEST: explanation.fastest_ms, SLOWEST: explanation.slowest_ms}
    zero = rounding.text(0.0)
    parts = [part for part in PARTS if any(rounding.text(parts_ms[part]) != zero for parts_ms in rows.values())]
    lines = [f"{'device':<10}{cells(parts)}"]
    for name, parts_ms in rows.items():
        total = sum(parts_ms.values()) if name in (FASTEST, SLOWEST) else explanation.step_ms
        lines.append(f"{name:<10}{cells(rounding.adding_up([parts_ms[part] for part in parts], total))}")
    return lines


def _prediction_rows(explanation: Explanation, rounding: Rounding) -> list[str]:
    predicted = explanation.prediction
    if predicted is None:
        return []
    exposed: Counter[tuple[int, str]] = Counter()
    for bucket in explanation.buckets:
        exposed[bucket.index, bucket.kind] += bucket.exposed_ms  # type: ignore[assignment]
    rows = [
        ("step", predicted.step_ms, explanation.step_ms),
        ("regions", predicted.compute_ms, explanation.compute_ms),
        ("update", predicted.update_ms, explanation.update_ms),
        *(
            (f"b{waits.index} exposed", waits.exposed_ms, exposed[waits.index, waits.kind])
            for waits in predicted.buckets
        ),
    ]
    width = max([16, *(len(name) for name, _, _ in rows)])
    lines = [f"{'simulation, ms':<{width}}{'predicted':>10}{'measured':>10}"]
    lines += [f"{name:<{width}}{rounding.text(ms):>10}{rounding.text(was_ms):>10}" for name, ms, was_ms in rows]
    return lines + _wrapped(f"the prediction stands on {predicted.stands_on}")


def _definitions(explanation: Explanation, *, has_model_row: bool) -> list[str]:
    buckets = explanation.buckets
    columns = _BUCKET_COLUMNS
    columns += _MESSAGES if any(bucket.source is not None for bucket in buckets) else ""
    columns += _ROUNDS if any(bucket.chunk is not None or bucket.round is not None for bucket in buckets) else ""
    columns += _PACKS if any(bucket.pack is not None for bucket in buckets) else ""
    columns += _SUMS if len(buckets) > len(explanation.totals) else ""
    columns += _MODEL if has_model_row else ""
    spread = f"; {FASTEST} and {SLOWEST} are single steps, as means over devices" if explanation.num_steps > 1 else ""
    parts = "; ".join(f"{part}: {meaning}" for part, meaning in PARTS.items())
    rows = f"each row adds up to the step{spread}; parts that are 0 are left out"
    return [*_wrapped(f"bucket: {columns}"), *_wrapped(f"device: {rows}. {parts}")]


def bucket_rows(
    buckets: Sequence[BucketTimes], meetings_ms: float, skew_units: int, transfer_units: int, rounding: Rounding
) -> list[str]:
    """Rows for each bucket and its messages or packs, and for the sum: the step's skew and transfer.

    Args:
        meetings_ms: waits of the model's collectives.
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
    return [*lines, *_compressed_lines(buckets)]


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


def _compressed_lines(buckets: Sequence[BucketTimes]) -> list[str]:
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
    return _wrapped(f"compressed: each worker gives {total}{''.join(each)}")


def cells(texts: Iterable[str]) -> str:
    return "".join(f"{text:>9}" for text in texts)
