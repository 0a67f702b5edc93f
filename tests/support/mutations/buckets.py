"""Mutations of the bucket table."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from mirrorc.ir.buckets import Bucket, Slot
from mirrorc.ir.program import Program, Stage
from mutations.places import pairs_alike, with_bucket, without
from mutations.table import Edit, breaks


def _with_slot(program: Program, bucket: Bucket, place: int, **changes: Any) -> Program:
    slots = list(bucket.slots)
    slots[place] = replace(slots[place], **changes)
    return with_bucket(program, bucket.index, slots=tuple(slots))


def slots_of(program: Program) -> Iterator[tuple[Bucket, int, Slot]]:
    for bucket in program.buckets:
        for place, slot in enumerate(bucket.slots):
            yield bucket, place, slot


def places_alike(bucket: Bucket) -> Iterator[tuple[int, int]]:
    def kind(place: int) -> Any:
        return bucket.slots[place].shape, bucket.slots[place].strides

    yield from pairs_alike(range(len(bucket.slots)), kind)


@breaks
def duplicate_a_slot(program: Program) -> Iterator[Edit]:
    """A variable has a second slot, in its own bucket or in another."""
    for bucket, _, slot in slots_of(program):
        for other in program.buckets:
            if other.index in (bucket.index, bucket.index + 1):
                again = replace(slot, offset=other.num_elements)
                size = other.num_elements + slot.num_elements + 16
                yield partial(with_bucket, program, other.index, slots=(*other.slots, again), num_elements=size)


@breaks
def overlap_two_slots(program: Program) -> Iterator[Edit]:
    """A slot begins in the one before it, openly or because that one is said to be smaller than its shape."""

    def edit(bucket: Bucket, place: int, size: int) -> Program:
        smaller = _with_slot(program, bucket, place, num_elements=size)
        begin = bucket.slots[place].offset + size
        return _with_slot(smaller, smaller.buckets[bucket.index], place + 1, offset=begin)

    for bucket in program.buckets:
        for place, (slot, _) in enumerate(pairwise(bucket.slots)):
            if slot.num_elements > 0:
                begin = slot.offset + slot.num_elements - 1
                yield partial(_with_slot, program, bucket, place + 1, offset=begin)
                yield partial(edit, bucket, place, slot.num_elements - 1)


@breaks
def let_a_slot_leave_its_bucket(program: Program) -> Iterator[Edit]:
    """A slot ends after its bucket, or begins before it."""
    for bucket in program.buckets:
        last = bucket.slots[-1]
        if last.num_elements:
            yield partial(_with_slot, program, bucket, len(bucket.slots) - 1, offset=bucket.num_elements)
            yield partial(with_bucket, program, bucket.index, num_elements=last.offset + last.num_elements - 1)
        yield partial(_with_slot, program, bucket, 0, offset=-16)


@breaks
def drop_a_slot(program: Program) -> Iterator[Edit]:
    """A variable's slot is missing from the table."""
    for bucket, place, _ in slots_of(program):
        slots = without(bucket.slots, place)
        yield partial(with_bucket, program, bucket.index, slots=slots)


@breaks
def drop_a_bucket(program: Program) -> Iterator[Edit]:
    """A bucket is missing from the table, or two are exchanged."""
    is_plan = program.stage is Stage.CAPTURED  # without buckets it would count as not planned yet
    for place in range(len(program.buckets)) if len(program.buckets) > is_plan else ():
        yield partial(program.evolve, buckets=without(program.buckets, place))
    for one, other in pairwise(program.buckets):
        exchanged = [{one: other, other: one}.get(bucket, bucket) for bucket in program.buckets]
        yield partial(program.evolve, buckets=tuple(exchanged))


@breaks
def exchange_two_slots(program: Program) -> Iterator[Edit]:
    """Two slots of one type have each other's variables, in the table alone, when gradients are packed."""

    def edit(bucket: Bucket, one: int, other: int) -> Program:
        names = bucket.slots[one].variable, bucket.slots[other].variable
        first = _with_slot(program, bucket, one, variable=names[1])
        return _with_slot(first, first.buckets[bucket.index], other, variable=names[0])

    for bucket in program.buckets if program.stage >= Stage.PACKED else ():
        for one, other in places_alike(bucket):
            yield partial(edit, bucket, one, other)


@breaks
def move_a_slot_to_another_bucket(program: Program) -> Iterator[Edit]:
    """A slot stands in another bucket of the table, when gradients are packed."""

    def edit(bucket: Bucket, place: int, other: Bucket) -> Program:
        slot = bucket.slots[place]
        rest = with_bucket(program, bucket.index, slots=without(bucket.slots, place))
        moved = (*other.slots, replace(slot, offset=other.num_elements))
        size = other.num_elements + slot.num_elements + 16
        return with_bucket(rest, other.index, slots=moved, num_elements=size)

    for bucket, place, _ in slots_of(program) if program.stage >= Stage.PACKED else ():
        for other in program.buckets:
            if other.index == bucket.index + 1:
                yield partial(edit, bucket, place, other)


@breaks
def change_a_buckets_dtype(program: Program) -> Iterator[Edit]:
    """A bucket has another dtype than the gradients in it."""
    for bucket in program.buckets:
        for dtype in (torch.float64, torch.bfloat16):
            if dtype is not bucket.dtype:
                yield partial(with_bucket, program, bucket.index, dtype=dtype)


@breaks
def change_a_slots_shape(program: Program) -> Iterator[Edit]:
    """A slot has another shape than its variable."""
    for bucket, place, slot in slots_of(program):
        if slot.shape != slot.shape[::-1]:
            yield partial(_with_slot, program, bucket, place, shape=slot.shape[::-1])
        if slot.shape != (slot.num_elements, 1):
            yield partial(_with_slot, program, bucket, place, shape=(slot.num_elements, 1), strides=(1, 1))


@breaks
def contradict_a_slots_shape(program: Program) -> Iterator[Edit]:
    """A slot has other strides than its variable, or a size that is not its shape's: the table contradicts itself."""
    for bucket, place, slot in slots_of(program):
        if slot.strides != slot.strides[::-1] and 1 not in slot.shape:
            yield partial(_with_slot, program, bucket, place, strides=slot.strides[::-1])
        if slot.num_elements > 1:
            yield partial(_with_slot, program, bucket, place, num_elements=slot.num_elements - 1)


@breaks
def change_a_buckets_update_rule(program: Program) -> Iterator[Edit]:
    """A bucket follows another update rule than the variables in it."""
    for bucket in program.buckets:
        for changes in ({"group": bucket.rule.group + 1}, {"elementwise": not bucket.rule.elementwise}):
            yield partial(with_bucket, program, bucket.index, rule=replace(bucket.rule, **changes))
