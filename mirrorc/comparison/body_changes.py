"""Differences of programs outside of buckets and schedules, in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from mirrorc.comparison.schedule_changes import where
from mirrorc.messages.wording import capped, counted, listed, numbered
from mirrorc.printing.printed_program import PrintedLine, PrintedProgram, PrintedRegion, PrintedValue

_LISTED = 6  # the most devices that a sentence names
_SENTENCES = 8  # the most sentences about one topic


def device_changes(old: PrintedProgram, new: PrintedProgram) -> Iterator[str]:
    for state, these, others in (("added", new, old), ("removed", old, new)):
        names = [device for device in these.devices if device not in others.devices]
        if names:
            yield f"{counted(len(names), 'device')} {state}: {listed(names, _LISTED)}"
    both = [[device for device in a.devices if device in b.devices] for a, b in ((old, new), (new, old))]
    if both[0] != both[1]:
        yield f"the devices are in another order: {listed(both[1], _LISTED)} instead of {listed(both[0], _LISTED)}"


def worker_changes(old: PrintedProgram, new: PrintedProgram) -> Iterator[str]:
    alone = "a process on its own"
    if old.worker != new.worker:
        yield f"it is the program of {new.worker or alone} instead of {old.worker or alone}"
    if old.workers and new.workers and old.workers != new.workers:
        yield f"of the workers it is said: {new.workers}; instead of: {old.workers}"


def group_changes(old: PrintedProgram, new: PrintedProgram) -> Iterator[str]:
    if any(function.name == "all_devices" for function in (*old.functions, *new.functions)):
        return
    both = set(old.devices) & set(new.devices)
    for program, other, sentence in (
        (old, new, "{} no longer {} the same program as {}"),
        (new, old, "{} now {} the same program as {}"),
    ):
        for function in program.functions:
            first, *rest = [device for device in function.devices if device in both] or [""]
            parted = [device for device in rest if other.function_of[device] is not other.function_of[first]]
            if parted:
                yield sentence.format(listed(parted, _LISTED), "runs" if len(parted) == 1 else "run", first)


def argument_changes(old: PrintedProgram, new: PrintedProgram) -> Iterator[str]:
    if any(function.name == "all_devices" for function in (*old.functions, *new.functions)):
        return  # a program of all devices prints no arguments
    devices = [device for device in new.devices if device in old.function_of]
    sentences: dict[str, list[str]] = defaultdict(list)
    for device in devices:
        for sentence in _signature_changes(old.function_of[device].arguments, new.function_of[device].arguments):
            sentences[sentence].append(device)
    yield from (sentence + where(changed, devices) for sentence, changed in sentences.items())


def body_changes(old: PrintedProgram, new: PrintedProgram) -> Iterator[str]:
    """Changed bodies of regions; at stage CAPTURED, changed graphs of one device."""
    yield from _captured_changes(old, new)
    if bool(old.regions) != bool(new.regions) and old.stage == new.stage:
        yield f"bodies of regions are printed in the {'new' if new.regions else 'old'} text alone and were not compared"
    elif old.regions and new.regions:
        for state, these, others in (("new", new.regions, old.regions), ("gone", old.regions, new.regions)):
            names = [name for name in these if name not in others]
            if names:
                yield f"the {'body' if len(names) == 1 else 'bodies'} of {numbered('region', names)} {_are(names)} {state}"
        changed = (
            _region_change(old.regions[name], region) for name, region in new.regions.items() if name in old.regions
        )
        yield from capped(filter(None, changed), _SENTENCES, "{} more regions changed")


def optimizer_changes(old: PrintedProgram, new: PrintedProgram) -> Iterator[str]:
    held = [dict(line.split(": ", 1) for line in program.optimizers) for program in (old, new)]
    for label in (label for label in held[1] if label in held[0]):
        was, now = (part[label].rpartition(" (at compilation")[0] for part in held)
        if was != now:
            yield f"{label} was compiled with {now} instead of {was}"


def remark_changes(old: PrintedProgram, new: PrintedProgram) -> Iterator[str]:
    for state, these, others in (("new", new.remarks, old.remarks), ("gone", old.remarks, new.remarks)):
        remarks = (Counter(these) - Counter(others)).elements()
        yield from capped(
            (f"remark {state}: {remark}" for remark in remarks), _SENTENCES, f"{{}} more remarks are {state}"
        )


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _signature_changes(old: Sequence[PrintedValue], new: Sequence[PrintedValue]) -> Iterator[str]:
    types = [{value.name: value.type for value in signature} for signature in (old, new)]
    for state, these, others in (("new", types[1], types[0]), ("gone", types[0], types[1])):
        names = [name for name in these if name not in others]
        if names:
            yield f"{numbered('argument', names)} {_are(names)} {state}"
    for name, kind in types[1].items():
        if types[0].get(name, kind) != kind:
            yield f"argument {name} is {kind} instead of {types[0][name]}"


def _captured_changes(old: PrintedProgram, new: PrintedProgram) -> Iterator[str]:
    if old.stage != new.stage or new.stage != "CAPTURED":
        return
    if len(old.functions) != len(new.functions):
        yield f"{counted(len(new.functions), 'graph')} of one device instead of {len(old.functions)}"
    for i, (before, after) in enumerate(zip(old.functions, new.functions, strict=False)):
        name = "the graph of one device" + (f" for {listed(after.devices)}" if len(new.functions) > 1 or i else "")
        changes = _statement_changes(before.lines, after.lines)
        if changes:
            yield f"{name} changed: {changes}"
        if before.outcome != after.outcome:
            yield f"{name} returns something else"


def _region_change(old: PrintedRegion, new: PrintedRegion) -> str:
    arguments = list(_signature_changes(old.arguments, new.arguments))
    if not arguments and old.arguments != new.arguments:
        arguments = ["its arguments are in another order"]
    results = (
        [f"it gives {len(new.results)} values instead of {len(old.results)}"]
        if len(old.results) != len(new.results)
        else []
    )
    if not results and old.results != new.results:
        results = ["it gives other values"]
    statements = _statement_changes(old.statements, new.statements)
    parts = [*([statements] if statements else []), *capped(arguments, 2, "{} more changes of its arguments"), *results]
    return f"region {new.name} changed: {'; '.join(parts)}" if parts else ""


def _statement_changes(old: Sequence[PrintedLine], new: Sequence[PrintedLine]) -> str:
    texts = [[statement.text for statement in statements] for statements in (old, new)]
    if texts[0] == texts[1]:
        return ""
    gone, added = Counter(texts[0]) - Counter(texts[1]), Counter(texts[1]) - Counter(texts[0])
    if not gone and not added:
        return "its statements are in another order"
    return f"{added.total()} of its {counted(len(new), 'statement')} are new, {gone.total()} of {len(old)} are gone"
