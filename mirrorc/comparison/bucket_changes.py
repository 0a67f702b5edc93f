"""Differences of bucket tables in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mirrorc.ir.variables import Placement
from mirrorc.messages.wording import capped, counted, listed, numbered
from mirrorc.printing.printed_program import PrintedBucket, PrintedProgram

_LISTED = 3  # the most gradients that a sentence names; others are counted
_FEW = 2  # the most buckets, or parts of a split or merge, whose content is described
_SENTENCES = 12  # the most sentences about one topic
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class BucketPairs:
    """Buckets by index; ``new_of`` maps old indices to new ones."""

    old: Mapping[int, PrintedBucket]
    new: Mapping[int, PrintedBucket]
    new_of: Mapping[int, int]

    @property
    def pairs(self) -> list[tuple[PrintedBucket, PrintedBucket]]:
        return [(self.old[i], self.new[j]) for i, j in sorted(self.new_of.items())]

    @property
    def gone(self) -> list[int]:
        return [i for i in self.old if i not in self.new_of]

    @property
    def added(self) -> list[int]:
        taken = set(self.new_of.values())
        return [j for j in self.new if j not in taken]


def pair_buckets(old: PrintedProgram, new: PrintedProgram) -> BucketPairs:
    """Pairs buckets that share an index and a gradient, then those with the most gradients in common."""
    tables = [{bucket.index: bucket for bucket in program.buckets} for program in (old, new)]
    place = _places(old.buckets)
    common = Counter((place[name], j) for name, j in _places(new.buckets).items() if name in place)
    new_of: dict[int, int] = {}
    taken: set[int] = set()
    for i, j in sorted(common, key=lambda pair: (pair[0] != pair[1], -common[pair], pair)):
        if i not in new_of and j not in taken:
            new_of[i] = j
            taken.add(j)
    return BucketPairs(tables[0], tables[1], new_of)


def bucket_changes(pairs: BucketPairs) -> Iterator[str]:
    """The most important changes come first."""
    yield from capped(_plan_changes(pairs), _SENTENCES, "{} more changes of which gradient is in which bucket")
    yield from capped(_order_changes(pairs), _SENTENCES, "{} more buckets have their gradients in another order")
    yield from _type_changes(pairs)
    yield from capped(_size_changes(pairs), _SENTENCES, "{} more buckets have another size")
    yield from _rule_changes(pairs)


def _places(buckets: Iterable[PrintedBucket]) -> dict[str, int]:
    return {gradient.variable: bucket.index for bucket in buckets for gradient in bucket.gradients}


def _plan_changes(pairs: BucketPairs) -> Iterator[str]:
    old_place, new_place = _places(pairs.old.values()), _places(pairs.new.values())
    moves: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, j in new_place.items():
        if name in old_place and pairs.new_of.get(old_place[name]) != j:
            moves[old_place[name], j].append(name)
    split, merged = _splits(pairs, moves), _merges(pairs, moves)
    for i, parts in split.items():
        into = sorted([*([pairs.new_of[i]] if i in pairs.new_of else []), *parts])
        yield f"bucket {i} was split into {numbered('bucket', into)}"
    for j, parts in merged.items():
        sources = sorted([*(i for i, counterpart in pairs.new_of.items() if counterpart == j), *parts])
        yield f"{numbered('bucket', sources)} were merged into bucket {j}"
    explained = {(i, j) for i, parts in split.items() for j in parts} | {
        (i, j) for j, parts in merged.items() for i in parts
    }
    yield from _whole_buckets(pairs, {j for _, j in explained}, {i for i, _ in explained}, old_place, new_place)
    for (i, j), names in sorted(moves.items()):
        if (i, j) not in explained or len(split.get(i, merged.get(j, []))) <= _FEW:
            yield f"{counted(len(names), 'gradient')} moved from bucket {i} to bucket {j}: {listed(names, _LISTED)}"
    yield from _single_gradients(pairs, old_place, new_place)
    renumbered = [
        f"{i} is {j} now" for i, j in sorted(pairs.new_of.items()) if i != j and i not in split and j not in merged
    ]
    if renumbered:
        yield f"{counted(len(renumbered), 'bucket')} with another number: {listed(renumbered)}"


def _splits(pairs: BucketPairs, moves: Mapping[tuple[int, int], Sequence[str]]) -> dict[int, list[int]]:
    split: dict[int, list[int]] = defaultdict(list)
    for j in pairs.added:
        sources = [i for i, target in moves if target == j]
        if len(sources) == 1:
            split[sources[0]].append(j)
    return {i: parts for i, parts in split.items() if i in pairs.new_of or len(parts) > 1}


def _merges(pairs: BucketPairs, moves: Mapping[tuple[int, int], Sequence[str]]) -> dict[int, list[int]]:
    merged: dict[int, list[int]] = defaultdict(list)
    for i in pairs.gone:
        goals = [j for source, j in moves if source == i]
        if len(goals) == 1:
            merged[goals[0]].append(i)
    return {j: parts for j, parts in merged.items() if j in pairs.new_of.values() or len(parts) > 1}


def _whole_buckets(
    pairs: BucketPairs, made: set[int], used_up: set[int], old_place: Mapping[str, int], new_place: Mapping[str, int]
) -> Iterator[str]:
    for state, whose, table, indices, explained, other in (
        ("new", "with new gradients", pairs.new, pairs.added, made, old_place),
        ("gone", "with its gradients", pairs.old, pairs.gone, used_up, new_place),
    ):
        alone = [index for index in indices if index not in explained]
        if len(alone) > _FEW:
            yield f"{numbered('bucket', alone)} are {state}"
            continue
        for index in alone:
            names = [gradient.variable for gradient in table[index].gradients]
            has_moved = any(name in other for name in names)
            yield f"bucket {index} is {state}" + ("" if has_moved else f", {whose}: {listed(names, _LISTED)}")


def _single_gradients(pairs: BucketPairs, old_place: Mapping[str, int], new_place: Mapping[str, int]) -> Iterator[str]:
    for state, buckets, stays, other in (
        ("new in", pairs.new, set(pairs.new_of.values()), old_place),
        ("gone from", pairs.old, set(pairs.new_of), new_place),
    ):
        for index in sorted(stays):
            names = [gradient.variable for gradient in buckets[index].gradients if gradient.variable not in other]
            if names:
                yield f"{counted(len(names), 'gradient')} {state} bucket {index}: {listed(names, _LISTED)}"


def _order_changes(pairs: BucketPairs) -> Iterator[str]:
    for old, new in pairs.pairs:
        names = [[gradient.variable for gradient in bucket.gradients] for bucket in (old, new)]
        both = set(names[0]) & set(names[1])
        before, after = ([name for name in part if name in both] for part in names)
        if before != after:
            first = next(i for i, name in enumerate(after) if before[i] != name)
            yield (
                f"the order of the gradients in bucket {new.index} changed: {after[first]} comes before {before[first]} now"
            )


def _type_changes(pairs: BucketPairs) -> Iterator[str]:
    types = [
        {g.variable: f"{b.dtype}{g.shape}" for b in table.values() for g in b.gradients}
        for table in (pairs.old, pairs.new)
    ]
    changed = [
        f"{name} is {types[1][name]} instead of {kind}"
        for name, kind in types[0].items()
        if types[1].get(name, kind) != kind
    ]
    if changed:
        subject = "gradient has" if len(changed) == 1 else "gradients have"
        yield f"{len(changed)} {subject} another shape or dtype: {listed(changed, _LISTED)}"


def _size_changes(pairs: BucketPairs) -> Iterator[str]:
    for old, new in pairs.pairs:
        if old.size != new.size and old.index == new.index:
            verb = "grew" if _num_bytes(new) > _num_bytes(old) else "shrank"
            yield f"bucket {new.index} {verb} from {old.size} to {new.size}"


def _num_bytes(bucket: PrintedBucket) -> float:
    number, unit = bucket.size.split(" ")
    return float(number) * _UNITS.get(unit, 1)


def _rule_changes(pairs: BucketPairs) -> Iterator[str]:
    topics: list[Callable[[PrintedBucket, PrintedBucket], str]] = [
        lambda old, new: f"updated by {new.rule} instead of {old.rule}" if old.rule != new.rule else "",
        lambda old, new: _placement(new.placement) if old.placement is not new.placement else "",
        lambda old, new: _owner(old, new) if old.owner != new.owner else "",
        lambda old, new: _sent(new) if old.is_sent_as_factors != new.is_sent_as_factors else "",
        lambda old, new: _ready(old, new),
    ]
    for topic in topics:
        buckets: dict[str, list[int]] = defaultdict(list)
        for old, new in pairs.pairs:
            buckets[topic(old, new)].append(new.index)
        for text, indices in buckets.items():
            if text:
                yield f"{numbered('bucket', indices)} {'is' if len(indices) == 1 else 'are'} {text}"


def _sent(new: PrintedBucket) -> str:
    return "sent to other workers as factors now" if new.is_sent_as_factors else "sent to other workers as a sum now"


def _placement(placement: Placement) -> str:
    return f"{placement.value.word} now: {placement.value.description}"


def _owner(old: PrintedBucket, new: PrintedBucket) -> str:
    if not new.owner:
        return f"left to no device now, and was left to {old.owner}"
    return f"left to {new.owner}" + (f" instead of {old.owner}" if old.owner else "")


def _ready(old: PrintedBucket, new: PrintedBucket) -> str:
    """Empty if the region is unchanged or unknown, or if the bucket's gradients changed."""
    names = [{gradient.variable for gradient in bucket.gradients} for bucket in (old, new)]
    if not (old.ready_after and new.ready_after) or old.ready_after == new.ready_after or names[0] != names[1]:
        return ""
    return f"ready after {new.ready_after} instead of {old.ready_after}"
