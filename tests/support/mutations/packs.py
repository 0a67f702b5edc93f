"""Mutations of what is packed, and of the slots that regions are given."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import bucket_of, replica_of
from mirrorc.ir.program import Program, Stage
from mutations.buckets import places_alike, slots_of
from mutations.places import (
    call_graphs,
    exchanged,
    is_value,
    next_like,
    pairs_alike,
    placed_nodes,
    region_calls,
    repeat_at_the_end,
    timelines,
    type_of,
    with_argument,
    with_bucket,
    with_keywords,
    without,
)
from mutations.table import Edit, breaks, keeps


def _packs_by_replica(program: Program) -> list[dict[int, fx.Node]]:
    found = []
    for timeline in timelines(program):
        packs = [node for node in timeline if node.target is ops.pack and node.args]
        found.append({bucket_of(node): node for node in packs if not program.buckets[bucket_of(node)].is_cut})
    return [packs for packs in found if packs]


def _whole_buckets(program: Program) -> list[Bucket]:
    return [bucket for bucket in program.buckets if not bucket.is_cut]


@breaks
def exchange_two_gradients_of_a_pack(program: Program) -> Iterator[Edit]:
    """One replica packs two gradients of one type as each other's."""
    for packs in _packs_by_replica(program):
        for bucket in _whole_buckets(program):
            for one, other in places_alike(bucket) if packs else ():
                pack = packs[bucket.index]
                yield partial(setattr, pack, "args", exchanged(pack.args, one, other))


def _factored(program: Program) -> list[fx.Node]:
    return list(placed_nodes(program, *ops.FACTORED))


@breaks(is_judged=True)
def make_a_gradient_of_other_factors(program: Program) -> Iterator[Edit]:
    """A gradient is made of another value of the type of one of its factors."""
    for product in _factored(program):
        values = [node for node in product.graph.nodes if node < product and is_value(node)]
        for place, factor in enumerate(product.args):
            own = [value for value in values if replica_of(value) == replica_of(product)]
            other = next_like(factor, own)  # type: ignore[arg-type]
            if other is not None:
                yield partial(with_argument, product, place, other)


@breaks
def call_factors_anothers_gradient(program: Program) -> Iterator[Edit]:
    """Factors are said to be the gradient of another variable, or to lie in another bucket."""
    for product in _factored(program):
        names = [slot.variable for _, _, slot in slots_of(program) if slot.variable != product.kwargs["variable"]]
        yield from (partial(with_keywords, product, variable=name) for name in names[:1])
        yield partial(with_keywords, product, bucket=bucket_of(product) + 1)


@breaks
def pad_another_row(program: Program) -> Iterator[Edit]:
    """Another row of a table's gradient is left out."""
    for node in placed_nodes(program, ops.index_add):
        yield partial(with_keywords, node, padding_idx=node.kwargs.get("padding_idx", -1) + 1)


@breaks
def exchange_two_gradients_everywhere(program: Program) -> Iterator[Edit]:
    """All replicas pack two gradients of one type as each other's; or regions' notes of what is whose say so, too."""

    def edit(bucket: Bucket, one: int, other: int, with_notes: bool) -> None:
        names = bucket.slots[one].variable, bucket.slots[other].variable
        for packs in _packs_by_replica(program):
            packs[bucket.index].args = exchanged(packs[bucket.index].args, one, other)
        for graph in call_graphs(program) if with_notes else ():
            for call in region_calls(graph.nodes):
                other_name = dict(zip(names, names[::-1], strict=True))
                noted = {other_name.get(name, name): place for name, place in call.kwargs["gradients"].items()}  # type: ignore[union-attr]
                call.kwargs = {**call.kwargs, "gradients": noted}

    for bucket in _whole_buckets(program) if program.stage >= Stage.PACKED else ():
        for one, other in places_alike(bucket):
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
            yield partial(setattr, pack, "args", without(pack.args, place))


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
            pack.args = without(pack.args, place)
        return with_bucket(program, bucket.index, slots=without(bucket.slots, place))

    for bucket, place, _ in slots_of(program) if program.stage >= Stage.PACKED else ():
        if len(bucket.slots) > 1 and not bucket.is_cut:
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
        with_argument(*one, theirs)
        with_argument(*other, mine)
        for slot in (mine, theirs):
            min(one[0], other[0]).prepend(slot)  # type: ignore[arg-type]

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


@breaks
def make_in_parts_what_others_take(program: Program) -> Iterator[Edit]:
    """An update is to make a gradient in parts that is a sum already, or that something else takes, too."""
    for node in placed_nodes(program, ops.update):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        is_share = source.target is ops.wait and source.args[0].target in (ops.reduce_scatter, ops.gather_factors)  # type: ignore[union-attr]
        if not is_share or len(source.users) > 1 or len(node.args) > 1:
            yield partial(with_keywords, node, part_elements=8)


@keeps
def make_parts_of_other_sizes(program: Program) -> Iterator[Edit]:
    """An update makes a gradient in other parts, or as a whole."""
    for node in placed_nodes(program, ops.update):
        if node.kwargs.get("part_elements"):
            yield partial(with_keywords, node, part_elements=5)
            yield partial(with_keywords, node, part_elements=None)
