"""Mutations of the bucket table, of slots, and of what is packed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from mirrorc import ops
from mirrorc.program import Bucket, Program, Slot, Stage
from mutations.places import (
    call_graphs,
    next_like,
    pairs_alike,
    placed_nodes,
    region_calls,
    repeat_at_the_end,
    timelines,
    type_of,
    with_argument,
    with_bucket,
)
from mutations.table import Edit, breaks


def _with_slot(program: Program, bucket: Bucket, place: int, **changes: Any) -> Program:
    slots = list(bucket.slots)
    slots[place] = replace(slots[place], **changes)
    return with_bucket(program, bucket.index, slots=tuple(slots))


def _slots(program: Program) -> Iterator[tuple[Bucket, int, Slot]]:
    for bucket in program.buckets:
        for place, slot in enumerate(bucket.slots):
            yield bucket, place, slot


def _places_alike(bucket: Bucket) -> Iterator[tuple[int, int]]:
    """Pairs of a bucket's slots of one type."""

    def kind(place: int) -> Any:
        return bucket.slots[place].shape, bucket.slots[place].strides

    yield from pairs_alike(range(len(bucket.slots)), kind)


@breaks
def duplicate_a_slot(program: Program) -> Iterator[Edit]:
    """A variable has a second slot, in its own bucket or in another."""
    for bucket, _, slot in _slots(program):
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
    for bucket, place, _ in _slots(program):
        slots = (*bucket.slots[:place], *bucket.slots[place + 1 :])
        yield partial(with_bucket, program, bucket.index, slots=slots)


@breaks
def drop_a_bucket(program: Program) -> Iterator[Edit]:
    """A bucket is missing from the table, or two are exchanged."""
    is_plan = program.stage is Stage.CAPTURED  # without buckets it would count as not planned yet
    for place in range(len(program.buckets)) if len(program.buckets) > is_plan else ():
        yield partial(program.evolve, buckets=(*program.buckets[:place], *program.buckets[place + 1 :]))
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
        for one, other in _places_alike(bucket):
            yield partial(edit, bucket, one, other)


@breaks
def move_a_slot_to_another_bucket(program: Program) -> Iterator[Edit]:
    """A slot stands in another bucket of the table, when gradients are packed."""

    def edit(bucket: Bucket, place: int, other: Bucket) -> Program:
        slot = bucket.slots[place]
        without = with_bucket(program, bucket.index, slots=(*bucket.slots[:place], *bucket.slots[place + 1 :]))
        moved = (*other.slots, replace(slot, offset=other.num_elements))
        size = other.num_elements + slot.num_elements + 16
        return with_bucket(without, other.index, slots=moved, num_elements=size)

    for bucket, place, _ in _slots(program) if program.stage >= Stage.PACKED else ():
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
    for bucket, place, slot in _slots(program):
        if slot.shape != slot.shape[::-1]:
            yield partial(_with_slot, program, bucket, place, shape=slot.shape[::-1])
        if slot.shape != (slot.num_elements, 1):
            yield partial(_with_slot, program, bucket, place, shape=(slot.num_elements, 1), strides=(1, 1))


@breaks
def contradict_a_slots_shape(program: Program) -> Iterator[Edit]:
    """A slot has other strides than its variable, or a size that is not its shape's: the table contradicts itself."""
    for bucket, place, slot in _slots(program):
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


def _packs_by_replica(program: Program) -> list[dict[int, fx.Node]]:
    found = []
    for timeline in timelines(program):
        found.append({ops.bucket_of(node): node for node in timeline if node.target is ops.pack})
    return found


def _exchange_in(pack: fx.Node, one: int, other: int) -> None:
    args = list(pack.args)
    args[one], args[other] = args[other], args[one]
    pack.args = tuple(args)


@breaks
def exchange_two_gradients_of_a_pack(program: Program) -> Iterator[Edit]:
    """One replica packs two gradients of one type as each other's."""
    for packs in _packs_by_replica(program):
        for bucket in program.buckets:
            for one, other in _places_alike(bucket) if packs else ():
                yield partial(_exchange_in, packs[bucket.index], one, other)


@breaks
def exchange_two_gradients_everywhere(program: Program) -> Iterator[Edit]:
    """All replicas pack two gradients of one type as each other's; or regions' notes of what is whose say so, too."""

    def edit(bucket: Bucket, one: int, other: int, with_notes: bool) -> None:
        names = bucket.slots[one].variable, bucket.slots[other].variable
        for packs in _packs_by_replica(program):
            _exchange_in(packs[bucket.index], one, other)
        for graph in call_graphs(program) if with_notes else ():
            for call in region_calls(graph.nodes):
                exchanged = dict(zip(names, names[::-1], strict=True))
                noted = {exchanged.get(name, name): place for name, place in call.kwargs["gradients"].items()}  # type: ignore[union-attr]
                call.kwargs = {**call.kwargs, "gradients": noted}

    for bucket in program.buckets if program.stage >= Stage.PACKED else ():
        for one, other in _places_alike(bucket):
            yield from (partial(edit, bucket, one, other, with_notes) for with_notes in (False, True))


@breaks
def exchange_gradients_of_two_buckets(program: Program) -> Iterator[Edit]:
    """A replica packs gradients of one type into each other's buckets."""

    def edit(one: fx.Node, other: fx.Node, places: tuple[int, int]) -> None:
        mine, theirs = one.args[places[0]], other.args[places[1]]
        with_argument(one, places[0], theirs)
        with_argument(other, places[1], mine)
        other.append(one)

    for packs in _packs_by_replica(program):
        for one, other in pairwise(packs.values()):
            if all(other < user for user in one.users):
                for i, gradient in enumerate(one.all_input_nodes):
                    alike = next_like(gradient, other.all_input_nodes)
                    if alike is not None:
                        yield partial(edit, one, other, (i, other.all_input_nodes.index(alike)))


@breaks
def drop_a_gradient_from_a_pack(program: Program) -> Iterator[Edit]:
    """A replica packs all gradients of a bucket but one."""
    for pack in placed_nodes(program, ops.pack):
        for place in range(len(pack.args)):
            yield partial(setattr, pack, "args", (*pack.args[:place], *pack.args[place + 1 :]))


@breaks
def pack_a_gradient_twice(program: Program) -> Iterator[Edit]:
    """A replica packs one gradient in place of another of its type."""
    for pack in placed_nodes(program, ops.pack):
        for place, gradient in enumerate(pack.all_input_nodes):
            other = next_like(gradient, pack.all_input_nodes)
            if other is not None:
                yield partial(with_argument, pack, place, other)


@breaks
def forget_a_gradient_everywhere(program: Program) -> Iterator[Edit]:
    """A variable has neither a slot nor a place in a pack: nothing updates it."""

    def edit(bucket: Bucket, place: int) -> Program:
        for packs in _packs_by_replica(program):
            pack = packs[bucket.index]
            pack.args = (*pack.args[:place], *pack.args[place + 1 :])
        return with_bucket(program, bucket.index, slots=(*bucket.slots[:place], *bucket.slots[place + 1 :]))

    for bucket, place, _ in _slots(program) if program.stage >= Stage.PACKED else ():
        if len(bucket.slots) > 1:
            yield partial(edit, bucket, place)


@breaks
def pack_once_more(program: Program) -> Iterator[Edit]:
    """A replica packs a bucket again when it is in flight, or used."""
    for pack in placed_nodes(program, ops.pack) if program.stage >= Stage.REDUCED else ():
        yield partial(repeat_at_the_end, pack)


@breaks
def misname_a_gradient(program: Program) -> Iterator[Edit]:
    """A region's note of whose gradient an output is names another place, or nothing, when gradients are packed."""

    def edit(call: fx.Node, change: Callable[[dict[str, int]], dict[str, int]]) -> None:
        call.kwargs = {**call.kwargs, "gradients": change(dict(call.kwargs["gradients"]))}  # type: ignore[arg-type]

    for graph in call_graphs(program) if program.stage >= Stage.PACKED else ():
        for call in region_calls(graph.nodes):
            for name in list(call.kwargs["gradients"]):  # type: ignore[arg-type]
                yield partial(edit, call, lambda noted, name=name: {k: v for k, v in noted.items() if k != name})  # type: ignore[misc]
                yield partial(edit, call, lambda noted, name=name: {**noted, name: noted[name] + 1})  # type: ignore[misc]


def _slots_given(call: fx.Node) -> list[int]:
    return [i for i, node in enumerate(call.args) if isinstance(node, fx.Node) and node.target is ops.slot]


@breaks
def give_regions_each_others_slots(program: Program) -> Iterator[Edit]:
    """A region writes two gradients of one type into each other's slots, or two regions do."""

    def edit(one: tuple[fx.Node, int], other: tuple[fx.Node, int]) -> None:
        mine, theirs = one[0].args[one[1]], other[0].args[other[1]]
        for (call, place), slot in ((one, theirs), (other, mine)):
            with_argument(call, place, slot)
            call.prepend(slot)  # type: ignore[arg-type]
        first = min(one[0], other[0])
        first.prepend(mine)  # type: ignore[arg-type]
        first.prepend(theirs)  # type: ignore[arg-type]

    graphs = [[n for n in shard.nodes if n.op != "output"] for shard in program.shard_graphs]
    for nodes in [*graphs, *timelines(program)] if program.stage >= Stage.OUTLINED else ():
        given = [(call, place) for call in region_calls(nodes) for place in _slots_given(call)]
        for one, other in pairs_alike(given, lambda pair: type_of(pair[0].args[pair[1]])):  # type: ignore[arg-type]
            yield partial(edit, one, other)


@breaks
def give_a_region_a_slot_twice(program: Program) -> Iterator[Edit]:
    """A region writes two gradients of one type into the same slot."""
    for graph in call_graphs(program):
        for call in region_calls(graph.nodes):
            places = _slots_given(call)
            for one, other in pairs_alike(places, lambda place, call=call: type_of(call.args[place])):  # type: ignore[misc]
                yield partial(with_argument, call, one, call.args[other])


@breaks
def write_slots_in_flight(program: Program) -> Iterator[Edit]:
    """A region that gives gradients runs once more when its bucket is in flight, or used."""
    for graph in call_graphs(program) if program.stage >= Stage.REDUCED else ():
        for call in region_calls(graph.nodes):
            if _slots_given(call):
                yield partial(repeat_at_the_end, call)
