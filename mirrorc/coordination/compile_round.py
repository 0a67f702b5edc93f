"""A call of `mirrorc.compile` on several workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mirrorc.cluster import Cluster, Round, find_place, join
from mirrorc.messages.problem import problem, with_line
from mirrorc.options.communication import Communication


@dataclass(frozen=True)
class JointCompilation:
    """The joined workers and the round in which they compile; both None for a process on its own."""

    cluster: Cluster | None = None
    round: Round | None = None


@contextlib.contextmanager
def joint_compilation(distributed: Any, communication: Any) -> Iterator[JointCompilation]:
    """A context whose exceptions reach the other workers. On entering, it joins them, see `mirrorc.cluster.join`.

    Wrong values count as the defaults; they are refused later, within the context.
    """
    known = communication if isinstance(communication, Communication) else Communication()
    cluster = _joined_workers(distributed, known)
    if cluster is None:
        yield JointCompilation()
        return
    compilation = cluster.begin("mirrorc.compile")
    try:
        yield JointCompilation(cluster, compilation)
    except BaseException as error:
        compilation.fail(error)
        raise


def _joined_workers(distributed: Any, communication: Communication) -> Cluster | None:
    group = communication.process_group
    if distributed is False:
        if group is not None:
            why = "one names workers, and the other trains without them"
            fix = ("leave distributed=False out", "leave process_group= out")
            raise problem(ValueError, "MC1003: process_group= and distributed=False cannot be combined", why, fix)
        return None
    try:
        place = find_place(group)
    except ValueError as error:
        raise ValueError(with_line(str(error), "fix", "distributed=False, to train in this process alone")) from None
    if place.num_workers > 1:
        return join(group, timeout=communication.timeout)
    if distributed is True:
        fix = ("torchrun --nproc-per-node=2 train.py", "leave distributed= out")
        raise problem(ValueError, "MC6101: distributed is True, but this process is the only worker", fix=fix)
    return None
