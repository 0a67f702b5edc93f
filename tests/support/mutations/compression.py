"""Mutations of what makes sums narrow on their way to other workers, and wide again, and of what sends a part of them."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.graph_edits import insert
from mirrorc.ir.nodes import replica_of
from mirrorc.ir.program import Program
from mutations.places import bypass, placed_nodes, with_keywords
from mutations.table import Edit, breaks


@breaks
def send_one_share_wide(program: Program) -> Iterator[Edit]:
    """A device offers its share as it is, where others have compressed theirs."""

    for node in placed_nodes(program, ops.compress):
        yield partial(bypass, node)


@breaks
def take_a_narrow_sum(program: Program) -> Iterator[Edit]:
    """An update takes the sum over workers while it is narrow."""

    for node in placed_nodes(program, ops.decompress):
        yield partial(bypass, node)


@breaks
def widen_by_a_cast(program: Program) -> Iterator[Edit]:
    """A sum becomes wide in memory of its own, which the bucket does not have."""

    def edit(node: fx.Node) -> None:
        wide = node.meta["val"].dtype
        cast = insert(program, node, torch.ops.aten._to_copy.default, node.args, {"dtype": wide})
        node.replace_all_uses_with(cast)
        node.graph.erase_node(node)

    for node in placed_nodes(program, ops.decompress):
        yield partial(edit, node)


@breaks
def widen_twice(program: Program) -> Iterator[Edit]:
    """A device makes the sum wide twice."""

    def edit(node: fx.Node) -> None:
        with node.graph.inserting_after(node):
            again = node.graph.node_copy(node)
        again.args = (node,)

    for node in placed_nodes(program, ops.decompress):
        if replica_of(node) in (None, 0):
            yield partial(edit, node)


@breaks
def send_a_part_without_the_rest(program: Program) -> Iterator[Edit]:
    """A device offers its share without what earlier steps have not sent."""

    for node in placed_nodes(program, ops.add_unsent):
        yield partial(bypass, node)


@breaks
def add_the_rest_twice(program: Program) -> Iterator[Edit]:
    """A device adds what earlier steps have not sent to what has it already."""

    def edit(node: fx.Node) -> None:
        with node.graph.inserting_after(node):
            again = node.graph.node_copy(node)
        node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
        again.args = (node,)

    for node in placed_nodes(program, ops.add_unsent):
        yield partial(edit, node)


@breaks
def send_another_count(program: Program) -> Iterator[Edit]:
    """A worker sends no element, or more than there are."""

    for node in placed_nodes(program, ops.gather_largest):
        yield partial(with_keywords, node, count=0)
        yield partial(with_keywords, node, count=node.meta["val"].value.numel() + 1)


@breaks
def send_another_number_of_bytes(program: Program) -> Iterator[Edit]:
    """A worker sends a payload of no bytes, or of as many as the pack has, or one without a text."""

    for node in placed_nodes(program, ops.exchange_payload):
        value = node.meta["val"].value
        for words in ({"num_bytes": 0}, {"num_bytes": value.numel() * value.dtype.itemsize}, {"payload": ""}):
            yield partial(with_keywords, node, **words)
