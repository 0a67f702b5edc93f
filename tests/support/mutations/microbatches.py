"""Mutations of shards that are run in microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from mirrorc.analysis.slots_of_values import given_slots
from mirrorc.ir import ops
from mirrorc.ir.nodes import region_calls, region_of
from mirrorc.ir.program import Program
from mutations.places import placed_nodes, with_keywords
from mutations.table import Edit, breaks


@breaks
def take_another_microbatch(program: Program) -> Iterator[Edit]:
    """A microbatch gets the examples, or the random stream, of another one."""
    for node in placed_nodes(program, ops.microbatch, ops.microbatch_seed):
        index = node.kwargs["index"]
        yield partial(with_keywords, node, index=1 - index if index < 2 else 0)  # type: ignore[operator]


@breaks
def split_into_other_microbatches(program: Program) -> Iterator[Edit]:
    """Microbatches have other sizes than the program says."""
    for node in placed_nodes(program, ops.microbatch):
        first, *others = node.kwargs["sizes"]  # type: ignore[misc]
        yield partial(with_keywords, node, sizes=(*others, first, 1))


@breaks
def overwrite_an_earlier_microbatch(program: Program) -> Iterator[Edit]:
    """A region writes its gradients over those of the microbatch before, in place of adding to them."""
    for graph in program.graphs():
        for call in region_calls(graph):
            own = region_of(call).replace("_adding", "")
            if call.op == "call_function" and own != region_of(call) and own in program.regions and given_slots(call):
                yield partial(with_keywords, call, region=own)


@breaks
def add_to_an_empty_slot(program: Program) -> Iterator[Edit]:
    """The first microbatch adds its gradients to what the slot holds from the step before."""
    for graph in program.graphs():
        for call in region_calls(graph):
            name, _, shard = region_of(call).partition("_shard")
            own = f"{name}_adding{f'_shard{shard}' if shard else ''}"
            if call.op == "call_function" and own in program.regions and given_slots(call):
                yield partial(with_keywords, call, region=own)
