"""Mutations of rows of tables that the device which steps sends to others."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of
from mirrorc.ir.program import Program
from mutations.places import next_like, pairs_alike, placed_nodes, timelines, type_of, with_argument, with_bucket
from mutations.table import Edit, breaks


def _sums(timeline: list[fx.Node]) -> list[fx.Node]:
    return [node for node in timeline if node.target is ops.wait and node.all_input_nodes[0].target is ops.all_gather]


@breaks
def take_rows_of_the_gradient(program: Program) -> Iterator[Edit]:
    """The rows that are sent are those of the gradient, from before the step."""
    for node in placed_nodes(program, ops.updated_rows):
        yield partial(with_argument, node, 0, node.args[1])


@breaks
def go_by_the_rows_of_another(program: Program) -> Iterator[Edit]:
    """Rows are taken, or written, by the gradient of another table."""
    for timeline in timelines(program):
        sums = _sums(timeline)
        for node in timeline:
            if node.target in (ops.updated_rows, ops.store_rows):
                other = next_like(node.all_input_nodes[1], sums)
                if other is not None and other < node:
                    yield partial(with_argument, node, 1, other)


@breaks
def take_the_rows_of_another(program: Program) -> Iterator[Edit]:
    """Two tables of one type have each other's rows taken."""

    def edit(one: fx.Node, other: fx.Node) -> None:
        one.args, other.args = (other.args[0], one.args[1]), (one.args[0], other.args[1])

    for timeline in timelines(program):
        rows = [node for node in timeline if node.target is ops.updated_rows]
        for one, other in pairs_alike(rows, type_of):
            yield partial(edit, one, other)


@breaks
def store_rows_as_a_table(program: Program) -> Iterator[Edit]:
    """Rows are written as if they were a whole table."""

    def edit(node: fx.Node) -> None:
        node.target, node.args = ops.store, node.args[:1]

    for node in placed_nodes(program, ops.store_rows):
        yield partial(edit, node)


@breaks
def send_a_table_for_rows(program: Program) -> Iterator[Edit]:
    """The whole table is sent to who writes rows."""
    for node in placed_nodes(program, ops.updated_rows):
        for user in node.users:
            yield partial(user.replace_input_with, node, node.all_input_nodes[0])


@breaks
def send_rows_where_others_are_written(program: Program) -> Iterator[Edit]:
    """Rows of the gradient are sent alone, though the optimizer may write others."""
    for node in placed_nodes(program, ops.store_rows):
        index = bucket_of(node)
        rule = replace(program.buckets[index].rule, writes_rows=False)
        names = program.buckets[index].slot_of
        variables = {name: replace(v, update=rule) if name in names else v for name, v in program.variables.items()}
        yield partial(with_bucket, program.evolve(variables=variables), index, rule=rule)
