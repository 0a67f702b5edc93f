"""Mutations of what forward of a module keeps for its backward."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from mirrorc.ir import ops
from mirrorc.ir.nodes import replica_of
from mirrorc.ir.program import Program
from mutations.places import dropped, given_another, placed_nodes, with_argument, with_commits, with_keywords
from mutations.table import Edit, breaks, keeps


@breaks
def drop_a_kept_value(program: Program) -> Iterator[Edit]:
    """A replica does not keep a value that backward takes."""
    yield from dropped(program, ops.keep)


@breaks
def keep_another_value(program: Program) -> Iterator[Edit]:
    """A replica keeps a value twice, and another one not at all."""
    yield from given_another(program, ops.keep)


@breaks
def keep_under_another_number(program: Program) -> Iterator[Edit]:
    """A value is kept in the place of another one, or of none."""
    for node in placed_nodes(program, ops.keep):
        for number in (0, -1):
            if number != node.kwargs["number"]:
                yield partial(with_keywords, node, number=number)


@breaks
def keep_in_another_order(program: Program) -> Iterator[Edit]:
    """A replica keeps a value after the one that backward takes next."""
    for node, following in pairwise(placed_nodes(program, ops.keep)):
        if node.graph is following.graph and replica_of(node) == replica_of(following):
            yield partial(following.append, node)


@breaks
def keep_a_variable(program: Program) -> Iterator[Edit]:
    """A replica keeps memory of a variable, which may be written before backward."""
    for node in placed_nodes(program, ops.keep):
        reads = (read for read in placed_nodes(program, ops.read) if read.graph is node.graph)
        for read in [read for read in reads if replica_of(read) == replica_of(node)][:1]:
            yield partial(with_argument, node, 0, read)


@breaks
def keep_after_the_commit(program: Program) -> Iterator[Edit]:
    """A value is kept after the commit, when nothing may fail any more."""
    for node, commit in with_commits(program, ops.keep):
        yield partial(commit.append, node)


@keeps
def keep_the_last_value_later(program: Program) -> Iterator[Edit]:
    """The last value is kept right before its replica's commit."""
    last = {(node.graph, replica_of(node)): node for node in placed_nodes(program, ops.keep)}
    for node, commit in with_commits(program, ops.keep):
        if last[node.graph, replica_of(node)] is node:
            yield partial(commit.prepend, node)
