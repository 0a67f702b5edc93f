"""Calls in which a worker takes part after it has left its own loop, until all workers have left theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mirrorc.capture.arguments import Call, Leaf
from mirrorc.errors import ExecutionError
from mirrorc.joint_calls import JointCalls
from mirrorc.optimizer_groups import OptimizerGroups


@contextmanager
def until_all_have_left(
    joint: JointCalls | None, take_part: Callable[[], bool], is_closed: Callable[[], bool]
) -> Iterator[None]:
    """A block at whose end a worker takes part in the calls of the others until they have come to the end of theirs, too.

    What is raised in it ends the next call of the others.

    Args:
        joint: the calls of the step; None for a process on its own, which waits for nobody.
        take_part: takes part in one call; gives whether there may be another one.
        is_closed: whether the step is closed, which the others are told.

    Raises:
        ExecutionError: the block is inside of another one.
    """
    if joint is None:
        yield
        return
    if joint.is_joining:
        raise ExecutionError(
            "step.join() was entered inside of step.join(): one block around the loop is enough, leave the inner one out"
        )
    joint.is_joining = True
    try:
        try:
            yield
        except BaseException as error:
            joint.team.abandon(error)
            raise
        joint.has_left = True
        with _kept_hyperparameters(joint.optimizers):
            while not is_closed() and take_part():
                pass
    finally:
        joint.is_joining = joint.has_left = False


@contextmanager
def _kept_hyperparameters(optimizers: OptimizerGroups) -> Iterator[None]:
    """Puts the hyperparameters of groups back at the end, as objects."""
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizers.hyperparameters]
    try:
        yield
    finally:
        for group, values in zip(optimizers.hyperparameters, kept, strict=False):
            group.update(values)


def without_examples(call: Call) -> Call:
    """The same call with tensors that have no examples, in no memory; those that replicas get whole are kept."""
    return dataclasses.replace(call, leaves=tuple(_emptied(leaf) if leaf.split else leaf for leaf in call.leaves))


def _emptied(leaf: Leaf) -> Leaf:
    if leaf.tensor is None:
        return dataclasses.replace(leaf, per_replica=tuple(map(_no_rows, leaf.per_replica)))
    return dataclasses.replace(leaf, tensor=_no_rows(leaf.tensor))


def _no_rows(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided((0, *tensor.shape[1:]), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
