"""Mutations of what a step checks before it changes anything."""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import fx

from mirrorc.analysis.buckets.rescaling import is_checked, numbers_of, truths_of
from mirrorc.ir import ops
from mirrorc.ir.nodes import replica_of
from mirrorc.ir.program import Program, Stage
from mutations.places import (
    dropped,
    given_another,
    placed_nodes,
    timelines,
    with_argument,
    with_commits,
    with_keywords,
    without,
)
from mutations.table import Edit, breaks


@breaks
def drop_a_check(program: Program) -> Iterator[Edit]:
    """A check is not made."""
    yield from dropped(program, ops.check)


@breaks
def check_another_value(program: Program) -> Iterator[Edit]:
    """A check looks at the condition of another one."""
    yield from given_another(program, ops.check)


@breaks
def check_with_another_text(program: Program) -> Iterator[Edit]:
    """A check says something else when it fails."""
    for node in placed_nodes(program, ops.check):
        yield partial(with_keywords, node, text="something else")


@breaks
def check_after_everything(program: Program) -> Iterator[Edit]:
    """A check comes at the end, when others may have updated parameters."""
    for node in placed_nodes(program, ops.check):
        if any(n.target in ops.LAUNCHES or n.target in ops.UPDATES for n in node.graph.nodes):
            yield partial(node.graph.output_node().prepend, node)


@breaks
def check_after_the_commit(program: Program) -> Iterator[Edit]:
    """A check comes right after its replica's commit, when others may go on."""
    for node, commit in with_commits(program, ops.check):
        yield partial(commit.append, node)


@breaks
def look_at_another_value(program: Program) -> Iterator[Edit]:
    """What a commit is told of one sum is true of another sum of its replica, or of a bucket that is not reduced."""
    for timeline in timelines(program):
        values = [
            node
            for node in timeline
            if node.target in (ops.wait, ops.pack) and isinstance(node.meta["val"], torch.Tensor)
        ]
        for node in (n for n in timeline if n.target is ops.is_finite):
            (given,) = node.all_input_nodes
            for other in [value for value in values if value is not given and value < node][:2]:
                yield partial(with_argument, node, 0, other)


@breaks
def look_after_the_commit(program: Program) -> Iterator[Edit]:
    """What is finite is found out when the step is decided."""

    def edit(node: fx.Node) -> None:
        (commit,) = node.users
        commit.args = tuple(flag for flag in commit.args if flag is not node)
        commit.append(node)

    for node in placed_nodes(program, ops.is_finite):
        yield partial(edit, node)


@breaks
def leave_a_truth_out(program: Program) -> Iterator[Edit]:
    """A replica's commit is not told whether one value is finite, or whether any is."""
    for commit in placed_nodes(program, ops.commit):
        for place in range(len(truths_of(commit))):
            yield partial(setattr, commit, "args", without(commit.args, place))
        if is_checked(commit):
            yield partial(_tell_nothing, [commit])


@breaks
def leave_all_truths_out(program: Program) -> Iterator[Edit]:
    """No commit of a program that is checked is told anything."""
    commits = [commit for commit in placed_nodes(program, ops.commit) if is_checked(commit)]
    if commits:
        yield partial(_tell_nothing, commits)


def _tell_nothing(commits: Iterable[fx.Node]) -> None:
    for commit in commits:
        commit.args = tuple(numbers_of(commit))
        with_keywords(commit, otherwise=None)


@breaks
def do_otherwise_on_one_replica(program: Program) -> Iterator[Edit]:
    """One replica raises an error where the others skip the step, or the other way round."""
    for commit in placed_nodes(program, ops.commit):
        if is_checked(commit) and program.num_replicas > 1:
            yield partial(
                with_keywords, commit, otherwise={"raise": "skip", "skip": "raise"}[str(commit.kwargs["otherwise"])]
            )


@breaks
def wait_on_one_side_of_the_commit(program: Program) -> Iterator[Edit]:
    """One replica waits for a reduction on the other side of the commit than the others."""
    commits = {(node.graph, replica_of(node)): node for node in placed_nodes(program, ops.commit)}
    for wait in placed_nodes(program, ops.wait) if program.stage >= Stage.SCHEDULED else ():
        commit = commits.get((wait.graph, replica_of(wait)))
        if commit is None or wait.all_input_nodes[0].target not in ops.REDUCTIONS:
            continue
        if commit < wait:
            yield partial(commit.prepend, wait)
        elif not wait.users:
            yield partial(commit.append, wait)
