"""Mutations of shards that are run in microbatches."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from mirrorc.analysis.buckets.slots_of_values import slot_arguments
from mirrorc.ir import ops
from mirrorc.ir.gradient_forms import form_of
from mirrorc.ir.nodes import region_calls, region_of
from mirrorc.ir.program import Program
from mutations.places import exchanged, placed_nodes, with_keywords, without
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
            if (
                call.op == "call_function"
                and own != region_of(call)
                and own in program.regions
                and slot_arguments(call)
            ):
                yield partial(with_keywords, call, region=own)


@breaks
def add_to_an_empty_slot(program: Program) -> Iterator[Edit]:
    """The first microbatch adds its gradients to what the slot holds from the step before."""
    for graph in program.graphs():
        for call in region_calls(graph):
            name, _, shard = region_of(call).partition("_shard")
            own = f"{name}_adding{f'_shard{shard}' if shard else ''}"
            if call.op == "call_function" and own in program.regions and slot_arguments(call):
                yield partial(with_keywords, call, region=own)


def _parts(node: Any) -> list[tuple[Any, ...]]:
    return form_of(node).parts(node.args)


@breaks
def leave_out_the_factors_of_a_microbatch(program: Program) -> Iterator[Edit]:
    """A gradient is made of the factors of all microbatches but one."""
    for node in placed_nodes(program, *ops.FACTORED):
        parts = _parts(node)
        for index in range(len(parts)) if len(parts) > 1 else ():
            rest = without(parts, index)
            yield partial(setattr, node, "args", tuple(factor for part in rest for factor in part))


@breaks
def take_the_factors_of_a_microbatch_twice(program: Program) -> Iterator[Edit]:
    """A gradient is made of the factors of one microbatch in place of another's, or once more than there are."""
    for node in placed_nodes(program, *ops.FACTORED):
        first, *others = _parts(node)
        yield partial(setattr, node, "args", (*first, *node.args))
        for index, part in enumerate(others):
            if [factor.meta["val"].shape for factor in part] == [factor.meta["val"].shape for factor in first]:
                taken = (first, *others[:index], first, *others[index + 1 :])
                yield partial(setattr, node, "args", tuple(factor for part in taken for factor in part))


@breaks
def exchange_a_factor_of_two_microbatches(program: Program) -> Iterator[Edit]:
    """A factor of one microbatch stands beside one of another's."""
    for node in placed_nodes(program, *ops.FACTORED):
        first, *others = _parts(node)
        for index, part in enumerate(others):
            if part[0].meta["val"].shape == first[0].meta["val"].shape and part[1:] != first[1:]:
                yield partial(setattr, node, "args", exchanged(node.args, 0, len(first) * (index + 1)))
