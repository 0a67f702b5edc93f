"""Explanation of recorded steps."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mirrorc.ir.links import link_named
from mirrorc.messages.wording import counted, notebook_html
from mirrorc.printing.printed_values import size_text
from mirrorc.runtime.profiling.accounting import PARTS, apportioned
from mirrorc.runtime.profiling.figures import BucketTimes, DeviceTimes
from mirrorc.runtime.profiling.prediction import Prediction

_PARTS = "; c and r are the chunk of the bucket that is sent, and the round in which it is sent"
_PACKS = "; p is the pack of the bucket, of which each is in flight by itself"
_WIDTH = 110  # of texts; rows of tables may be longer
_NO_BREAK = "\N{NO-BREAK SPACE}"
_BUCKET_COLUMNS = (
    "ready (its last gradient is made), launched, waited (its wait begins) and finished (its wait ends) are moments from the "
    "step's beginning, as means over the devices that take part; means over all devices (0 for one that does not wait) are "
    "hidden (in flight while the device does something else; - where nothing moves before the wait) and exposed (in the wait) = "
    "skew + transfer; behind is what it waited for longest: a call of a device that launched late, or an earlier wait"
)


@dataclass(frozen=True)
class Explanation:
    """Breakdown of the last recorded steps' time; its `str` is a table, followed by definitions of the columns.

    All times are means over the third of the steps with the middle durations. Parts therefore add up.

    Attributes:
        num_steps: the recorded steps, without the program's first one if there are others.
        step_ms: from when the caller began to start the devices until the last device was done.
        parts_ms: the parts of step_ms, see `mirrorc.runtime.profiling.accounting.PARTS`, as means over devices.
        hidden_ms: the sum of the buckets' ``hidden_ms``; may exceed the step, because several buckets may be in flight.
        buckets: the collectives, in the order of their launches.
        devices: the devices' times, in order of replicas.
        advice: the change with the largest estimated gain, or why there is none.
        prediction: a simulation of the step over several workers; None for a single worker or unknown costs.
        capture: why capture fell back to another front end, and why changing sizes are fixed numbers in the program.
    """

    num_steps: int
    step_ms: float
    parts_ms: Mapping[str, float]
    hidden_ms: float
    buckets: tuple[BucketTimes, ...]
    devices: tuple[DeviceTimes, ...]
    advice: str
    prediction: Prediction | None = None
    capture: tuple[str, ...] = ()

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
        """The rest: starting devices, packing, launching, and waiting for the last device at the commit and the end."""
        return sum(self.parts_ms[part] for part in ("start", "pack", "launch", "commit", "other", "end"))

    def __str__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        return notebook_html(_summary(self)[0], str(self))


def _text(explanation: Explanation) -> str:
    parts = [
        _summary(explanation),
        _bucket_rows(explanation),
        _device_rows(explanation),
        _prediction_rows(explanation),
        _definitions(explanation),
    ]
    parts = [lines for lines in parts if lines]
    parts += [textwrap.wrap(text, _WIDTH, subsequent_indent="  ") for text in explanation.capture]
    parts.append(textwrap.wrap(f"advice: {explanation.advice}", _WIDTH, subsequent_indent="  "))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _digits(explanation: Explanation) -> int:
    return 3 if explanation.step_ms < 10 else 2 if explanation.step_ms < 1000 else 1


def _ms(explanation: Explanation, value: float) -> str:
    return f"{value:.{_digits(explanation)}f}"


def _adding_up(explanation: Explanation, values: Iterable[float], total: float) -> list[str]:
    """Rounds so that the printed values add up to the printed total."""
    scale = 10 ** _digits(explanation)
    num_units = round(
        float(_ms(explanation, total)) * scale
    )  # of what is printed: round(total * scale) may round a tie otherwise
    return [_ms(explanation, units / scale) for units in apportioned([*values], num_units)]


def _summary(explanation: Explanation) -> list[str]:
    names = ", ".join(device.device for device in explanation.devices)
    middle = (
        "the mean of the middle third of "
        if explanation.num_steps > 2
        else "the mean of "
        if explanation.num_steps == 2
        else ""
    )
    head = f"A step takes {_ms(explanation, explanation.step_ms)} ms; {middle}{counted(explanation.num_steps, 'step')} on {names}"
    times = _adding_up(explanation, explanation.parts_ms.values(), explanation.step_ms)
    percent = [f"{units / 10:.1f}%" for units in apportioned([*explanation.parts_ms.values()], 1000)]
    zero = _ms(explanation, 0.0)
    shares = [
        f"{part} {ms} ({share})"
        for part, ms, share in zip(explanation.parts_ms, times, percent, strict=True)
        if (ms, share) != (zero, "0.0%")
    ]
    whole = ", ".join(share.replace(" ", _NO_BREAK) for share in shares)
    wrapped = textwrap.wrap(whole, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return [
        textwrap.shorten(head, _WIDTH),
        *(line.replace(_NO_BREAK, " ") for line in wrapped),
        *_hidden_lines(explanation),
    ]


def _hidden_lines(explanation: Explanation) -> list[str]:
    """Not parts of the step: several buckets may be in flight at once."""
    links = list(dict.fromkeys(bucket.link for bucket in explanation.buckets if bucket.link))
    idle = [link for link in links if not link_named(link).moves_by_itself]
    reasons = []
    if len(idle) < len(links):
        reasons.append(f"hidden behind other work: {_ms(explanation, explanation.hidden_ms)} ms, summed over buckets")
    if idle:
        reasons.append(f"{' and '.join(idle)} {'moves' if len(idle) == 1 else 'move'} nothing before the wait")
    return textwrap.wrap("; ".join(reasons), _WIDTH, initial_indent="  ", subsequent_indent="  ") if reasons else []


def _bucket_rows(explanation: Explanation) -> list[str]:
    columns = ("ready", "launched", "waited", "finished", "hidden", "exposed", "skew", "transfer")
    width = max([6, *(len(bucket.label) for bucket in explanation.buckets)])
    lines = [f"{'bucket':<{width}}{'size':>10}{_row(columns)}  behind"]
    heading = ""
    for bucket in explanation.buckets:
        now = f"{bucket.kind} over {bucket.link}, ms" if bucket.link else "not communicated, ms"
        lines += [now] if now != heading else []
        heading = now
        cells = _row(_bucket_cells(explanation, bucket))
        row = f"{bucket.label:<{width}}{size_text(bucket.num_bytes):>10}{cells}  {bucket.behind}"
        lines.append(row.rstrip())
    return [*lines, *_compressed_lines(explanation)]


def _compressed_lines(explanation: Explanation) -> list[str]:
    sizes = {
        bucket.label: (bucket.num_bytes, bucket.uncompressed_bytes)
        for bucket in explanation.buckets
        if bucket.uncompressed_bytes is not None
    }
    if not sizes:
        return []
    savings = {label: f"{size_text(sent)} in place of {size_text(whole)}" for label, (sent, whole) in sizes.items()}
    total = " in place of ".join(size_text(sum(each)) for each in zip(*sizes.values(), strict=True))
    each = [f"; {label} {text}" for label, text in savings.items()] if len(savings) > 1 else []
    return textwrap.wrap(f"compressed: each worker gives {total}{''.join(each)}", _WIDTH, subsequent_indent="  ")


def _bucket_cells(explanation: Explanation, bucket: BucketTimes) -> Iterator[str]:
    for moment in ("ready", "launched", "waited", "finished"):
        yield _ms(explanation, getattr(bucket, f"{moment}_ms"))
    is_moving = bucket.link and link_named(bucket.link).moves_by_itself
    yield _ms(explanation, bucket.hidden_ms) if is_moving else "-"
    yield _ms(explanation, bucket.exposed_ms)
    yield from _adding_up(explanation, (bucket.skew_ms, bucket.transfer_ms), bucket.exposed_ms)


def _device_rows(explanation: Explanation) -> list[str]:
    zero = _ms(explanation, 0.0)
    parts = [part for part in PARTS if any(_ms(explanation, d.parts_ms[part]) != zero for d in explanation.devices)]
    lines = [f"{'device':<10}{_row(parts)}"]
    for device in explanation.devices:
        values = [device.parts_ms[part] for part in parts]
        lines.append(f"{device.device:<10}{_row(_adding_up(explanation, values, explanation.step_ms))}")
    return lines


def _prediction_rows(explanation: Explanation) -> list[str]:
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
    lines += [
        f"{name:<{width}}{_ms(explanation, predicted_ms):>10}{_ms(explanation, was):>10}"
        for name, predicted_ms, was in rows
    ]
    return lines + textwrap.wrap(f"the prediction stands on {predicted.stands_on}", _WIDTH, subsequent_indent="  ")


def _definitions(explanation: Explanation) -> list[str]:
    is_parted = any(bucket.chunk is not None or bucket.round is not None for bucket in explanation.buckets)
    columns = _BUCKET_COLUMNS + (_PARTS if is_parted else "")
    columns += _PACKS if any(bucket.pack is not None for bucket in explanation.buckets) else ""
    texts = [
        f"bucket: {columns}",
        f"device: each row adds up to the step; parts that are 0 are left out. {_defined(PARTS)}",
    ]
    return [line for text in texts for line in textwrap.wrap(text, _WIDTH, subsequent_indent="  ")]


def _defined(parts: Mapping[str, str]) -> str:
    return "; ".join(f"{part}: {meaning}" for part, meaning in parts.items())


def _row(cells: Iterable[str]) -> str:
    return "".join(f"{cell:>9}" for cell in cells)
