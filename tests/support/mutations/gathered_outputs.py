"""Mutations of what a step returns beside its loss."""

from collections.abc import Iterator
from functools import partial

from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.ir.type_rules import WAYS_TO_GATHER
from mutations.places import dropped, given_another, placed_nodes, with_commits, with_keywords
from mutations.table import Edit, breaks, keeps


@breaks
def drop_a_gather(program: Program) -> Iterator[Edit]:
    """A replica's part of an output is not handed over."""
    yield from dropped(program, ops.gather)


@breaks
def gather_another_value(program: Program) -> Iterator[Edit]:
    """A replica hands over its part of another output."""
    yield from given_another(program, ops.gather)


@breaks
def gather_under_another_name(program: Program) -> Iterator[Edit]:
    """A replica's part is handed over under the name of another output, or of none."""
    for node in placed_nodes(program, ops.gather):
        names = {str(n.kwargs["output"]) for n in placed_nodes(program, ops.gather)} - {str(node.kwargs["output"])}
        for name in (*sorted(names)[:1], "nothing"):
            yield partial(with_keywords, node, output=name)


@breaks
def gather_in_another_way(program: Program) -> Iterator[Edit]:
    """A replica's part is put together with the others in another way."""
    for node in placed_nodes(program, ops.gather):
        for how in WAYS_TO_GATHER:
            if how != node.kwargs["how"]:
                yield partial(with_keywords, node, how=how)


@breaks
def gather_after_the_commit(program: Program) -> Iterator[Edit]:
    """A part is handed over after the commit, when nothing may fail any more."""
    for node, commit in with_commits(program, ops.gather):
        yield partial(commit.append, node)


@keeps
def gather_later(program: Program) -> Iterator[Edit]:
    """A part is handed over right before its replica's commit."""
    for node, commit in with_commits(program, ops.gather):
        yield partial(commit.prepend, node)
