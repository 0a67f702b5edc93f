"""Differences of collectives, waits, updates and region calls in words."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mirrorc.ir import ops
from mirrorc.ir.operation import Kind, operation_named
from mirrorc.messages.wording import capped, listed, numbered
from mirrorc.printing.printed_program import PrintedLine, PrintedProgram, split_list

PACK, WAIT, WRITE, FACTORED = (kind.value for kind in (Kind.PACK, Kind.WAIT, Kind.WRITE, Kind.FACTORED))

_VARIANT = re.compile(r"\.shard\d+$")  # ends a region's name for another shard shape

Key = tuple[str, str, int]
"""Identifies an event in both programs: kind; bucket, region or gradient; number among such events of a device."""


@dataclass(frozen=True)
class Event:
    """A line of a device's program. The key has the `mirrorc.ir.operation.Kind` of its operation."""

    key: Key
    line: PrintedLine

    @property
    def subject(self) -> str:
        return self.key[1]


@dataclass(frozen=True)
class Schedule:
    events: tuple[Event, ...]

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event.key[0] in kinds]


def schedule_of(program: PrintedProgram, device: str, name_of: Callable[[str], str]) -> Schedule:
    """``name_of`` maps a printed bucket index to the bucket's name in the keys."""
    counts: Counter[tuple[str, str]] = Counter()
    events = []
    for line in program.lines_of(device):
        kind = _kind(line.operation)
        bucket = line.details.get("bucket")
        subject = name_of(bucket) if bucket is not None and kind != "operator" else line.operation
        if kind == FACTORED:
            subject = line.results[0].name if line.results else ""
        counts[kind, subject] += 1
        events.append(Event((kind, subject, counts[kind, subject]), line))
    return Schedule(tuple(events))


def _kind(operation: str) -> str:
    ir_operation = operation_named(operation)
    if ir_operation is not None:
        return ir_operation.kind.value
    is_operator = "." in _VARIANT.sub("", operation) or operation == "getitem"
    return (Kind.COMPUTE if is_operator else Kind.REGION).value


_SENTENCES = 8  # the most sentences about one topic
_ORDER = 8  # the most buckets that are listed to show an order
_WHOLE = "optimizer's own step"


def schedule_changes(old: PrintedProgram, new: PrintedProgram, new_of: Mapping[int, int]) -> Iterator[str]:
    """The most important changes come first. ``new_of`` maps old buckets to their counterparts."""
    numbers = {str(bucket.index) for bucket in new.buckets}
    names = {str(i): str(j) for i, j in new_of.items()}
    devices = [device for device in new.devices if device in old.function_of]
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)  # devices that share a function in both programs
    for device in devices:
        functions = [program.function_of[device] for program in (old, new)]
        column = device if any(function.name == "all_devices" for function in functions) else ""
        alike[*(function.number for function in functions), column].append(device)
    pairs = [
        (
            schedule_of(old, group[0], lambda i: names.get(i, f"{i} of before" if i in numbers else i)),
            schedule_of(new, group[0], str),
            group,
        )
        for group in alike.values()
    ]
    for topic in _TOPICS:
        sentences: dict[str, list[str]] = defaultdict(list)
        for before, after, group in pairs:
            for sentence in topic(before, after):
                sentences[sentence] += group
        yield from (sentence + where(changed, devices) for sentence, changed in sentences.items())


def where(changed: Sequence[str], devices: Sequence[str]) -> str:
    """The end of a sentence that names the ``changed`` devices; empty if there is only one device."""
    if len(devices) == 1:
        return ""
    return ", on every device" if len(changed) == len(devices) else f", on {listed(changed)}"


def _launch_changes(old: Schedule, new: Schedule) -> Iterator[str]:
    launches = [{event.key: event for event in schedule.of("launch")} for schedule in (old, new)]
    instead: dict[tuple[str, str], list[str]] = defaultdict(list)
    alone: dict[tuple[str, str], list[str]] = defaultdict(list)
    details: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for state, these, others in (("is new", launches[1], launches[0]), ("is gone", launches[0], launches[1])):
        for key, event in these.items():
            if key not in others:
                alone[event.line.operation, state].append(event.subject)
    for key in (key for key in launches[0] if key in launches[1]):
        before, after = launches[0][key].line, launches[1][key].line
        if before.operation != after.operation:
            instead[before.operation, after.operation].append(key[1])
        for name in dict.fromkeys([*before.details, *after.details]):
            values = before.details.get(name, "none"), after.details.get(name, "none")
            if name != "bucket" and values[0] != values[1]:
                details[after.operation, name, *values].append(key[1])
    for (was, now), buckets in instead.items():
        yield f"{now} instead of {was} for {numbered('bucket', buckets)}"
    for (operation, state), buckets in alone.items():
        yield f"{operation} of {numbered('bucket', buckets)} {state}"
    for (operation, name, was, now), buckets in details.items():
        yield f"{name} {now} instead of {was} for {operation} of {numbered('bucket', buckets)}"


def _wait_changes(old: Schedule, new: Schedule) -> Iterator[str]:
    waits, launches = ([{event.key[1:] for event in part.of(kind)} for part in (old, new)] for kind in (WAIT, "launch"))
    for state, alone in (("new", waits[1] - waits[0]), ("gone", waits[0] - waits[1])):
        buckets = [key[0] for key in sorted(alone & launches[0] & launches[1])]
        if buckets:
            yield f"the wait for {numbered('bucket', buckets)} is {state}"


def _order_of(kind: str, sentence: str) -> Callable[[Schedule, Schedule], Iterator[str]]:
    def changes(old: Schedule, new: Schedule) -> Iterator[str]:
        was, now = _reordered(old, new, kind)
        if was:
            yield sentence.format(*(_in_order([_named(key) for key in order]) for order in (now, was)))

    return changes


def _reordered(old: Schedule, new: Schedule, kind: str) -> tuple[list[Key], list[Key]]:
    keys = [[event.key for event in schedule.of(kind)] for schedule in (old, new)]
    both = set(keys[0]) & set(keys[1])
    was, now = ([key for key in part if key in both] for part in keys)
    differ = [i for i, key in enumerate(was) if now[i] != key] or [0, -1]
    return was[differ[0] : differ[-1] + 1], now[differ[0] : differ[-1] + 1]


def _in_order(names: Sequence[str]) -> str:
    return ", ".join(names[:_ORDER]) + (f" and {len(names) - _ORDER} more" if len(names) > _ORDER else "")


def _named(key: Key) -> str:
    return _WHOLE if key[1] == ops.step_optimizer.__name__ else key[1]


def _of_buckets(names: Sequence[str]) -> str:
    buckets = [name for name in names if name != _WHOLE]
    return " and ".join(
        [*([numbered("bucket", buckets)] if buckets else []), *([f"the {_WHOLE}"] if _WHOLE in names else [])]
    )


def _moves_of(kind: str, sentence: str) -> Callable[[Schedule, Schedule], Iterator[str]]:
    """Reports events moved relative to regions and, where possible, to updates."""

    def changes(old: Schedule, new: Schedule) -> Iterator[str]:
        anchors = _common_anchors(old, new, *([] if kind == "update" else [("region", "update")]), ("region",))
        if anchors is None:
            return
        places = [_places(schedule, kind, anchors) for schedule in (old, new)]
        moved: dict[str, list[tuple[Key, str]]] = {"earlier": [], "later": []}
        order = [event.key for event in new.events if event.key[0] in anchors]
        reordered = set(_reordered(old, new, kind)[0] if kind != WAIT else [])  # another topic has reported these
        for key, place in places[1].items():
            before = places[0].get(key, place) if key not in reordered else place
            if place > before:
                moved["later"].append((key, f"after {_anchor(order[place - 1])}"))
            elif place < before:
                moved["earlier"].append((key, f"before {_anchor(order[place])}"))
        for direction, events in moved.items():
            if events:
                subject = sentence.format(
                    "" if len(events) == 1 else "s", _of_buckets([_named(key) for key, _ in events])
                )
                which = (
                    events[0][1]
                    if len(events) == 1
                    else f"that of {_of_buckets([_named(events[0][0])])} {events[0][1]}"
                )
                yield f"{subject} {'comes' if len(events) == 1 else 'come'} {direction}, {which} now"

    return changes


def _common_anchors(old: Schedule, new: Schedule, *choices: tuple[str, ...]) -> tuple[str, ...] | None:
    """The first choice of event kinds whose events both schedules have in the same order."""
    for kinds in choices:
        keys = [[event.key for event in schedule.of(*kinds)] for schedule in (old, new)]
        if keys[0] == keys[1] and keys[0]:
            return kinds
    return None


def _places(schedule: Schedule, kind: str, anchors: Iterable[str]) -> dict[Key, int]:
    passed, places = 0, {}
    for event in schedule.events:
        passed += event.key[0] in anchors
        if event.key[0] == kind:
            places[event.key] = passed
    return places


def _anchor(key: Key) -> str:
    if key[0] == "region":
        return key[1]
    return f"the {_WHOLE}" if key[1] == ops.step_optimizer.__name__ else f"the update of bucket {key[1]}"


def _update_changes(old: Schedule, new: Schedule) -> Iterator[str]:
    """Excludes buckets that are new or gone."""
    lines = [{event.key: event.line for event in schedule.of("update")} for schedule in (old, new)]
    packed = [{event.subject for event in schedule.of(PACK)} for schedule in (old, new)]
    alone = packed[0] ^ packed[1] if packed[0] and packed[1] else set()
    sentences: dict[str, list[str]] = defaultdict(list)
    for key in (key for key in dict.fromkeys([*lines[1], *lines[0]]) if key[1] not in alone):
        was, now = (part[key].operation if key in part else "" for part in lines)
        if was and now and was != now:
            sentences[f"{now} instead of {was} for {{}}"].append(_named(key))
        elif not (was and now):
            subject = "" if _named(key) == _WHOLE else f"{now or was} of "
            sentences[f"{subject}{{}} is {'new' if now else 'gone'}"].append(_named(key))
    for sentence, buckets in sentences.items():
        yield sentence.format(_of_buckets(buckets))


def _region_changes(old: Schedule, new: Schedule) -> Iterator[str]:
    calls = [{event.key: event.line for event in schedule.of("region")} for schedule in (old, new)]
    known = [{key[1] for key in part} for part in calls]
    for state, often, (these, others), names in (
        ("new", "more", (calls[1], calls[0]), known[0]),
        ("gone", "less", (calls[0], calls[1]), known[1]),
    ):
        names_alone = list(dict.fromkeys(key[1] for key in these if key not in others))
        alone, repeated = (
            [name for name in names_alone if name not in names],
            [name for name in names_alone if name in names],
        )
        if alone:
            yield f"{numbered('region', alone)} {'is' if len(alone) == 1 else 'are'} {state}"
        if repeated:
            yield f"{numbered('region', repeated)} {'is' if len(repeated) == 1 else 'are'} called {often} often"
    if calls[0].keys() == calls[1].keys():  # else the program is cut elsewhere, and names mean other regions
        yield from capped(_call_changes(*calls), _SENTENCES, "{} more calls of regions give or take something else")


def _factored_changes(old: Schedule, new: Schedule) -> Iterator[str]:
    factored = [[event.subject for event in schedule.of(FACTORED)] for schedule in (old, new)]
    for these, others, state in (
        (factored[1], factored[0], "left as factors, of which each device makes its share"),
        (factored[0], factored[1], "made whole, no longer left as factors"),
    ):
        names = [name for name in these if name not in others]
        if names:
            yield f"{listed(names)} {'is' if len(names) == 1 else 'are'} {state}"


def _call_changes(old: Mapping[Key, PrintedLine], new: Mapping[Key, PrintedLine]) -> Iterator[str]:
    for key in new:
        if _gradients(old[key]) != _gradients(new[key]):
            continue  # backward is cut at other places, as the changes of buckets report
        for verb, was, now in (
            ("gives", old[key].outcome, new[key].outcome),
            ("is given", old[key].inside, new[key].inside),
        ):
            if was != now:
                yield f"{key[1]} {verb} {_difference(split_list(was), split_list(now))}"


def _gradients(line: PrintedLine) -> list[tuple[str, int]]:
    values = [(value.name, value.count) for value in line.results]
    return [value for value in values if value[0].startswith("d(") or value[0] == "gradients"]


def _difference(old: Sequence[str], new: Sequence[str]) -> str:
    gone, added = ([part for part in these if part not in set(others)] for these, others in ((old, new), (new, old)))
    if gone and added:
        return f"{listed(added)} instead of {listed(gone)}"
    if added:
        return f"{listed(added)} as well"
    return f"{listed(gone)} no longer" if gone else "the same in another order"


def _write_changes(old: Schedule, new: Schedule) -> Iterator[str]:
    written = [[part for event in schedule.of(WRITE) for part in event.line.arguments] for schedule in (old, new)]
    if written[0] != written[1]:
        yield f"at the end of the step it writes {listed(written[1]) or 'nothing'} instead of {listed(written[0]) or 'nothing'}"


_TOPICS: tuple[Callable[[Schedule, Schedule], Iterable[str]], ...] = (
    _launch_changes,
    _order_of("launch", "collectives are launched in the order of buckets {} instead of {}"),
    _moves_of("launch", "the launch{} for {}"),
    _wait_changes,
    _moves_of(WAIT, "the wait{} for {}"),
    _update_changes,
    _order_of("update", "updates run in the order of buckets {} instead of {}"),
    _moves_of("update", "the update{} of {}"),
    _factored_changes,
    _region_changes,
    _order_of("region", "regions run in the order {} instead of {}"),
    _write_changes,
)
