"""A call of `mirrorc.compile` on several workers."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from mirrorc.cluster import Cluster, Round, find_place, join
from mirrorc.messages.problem import problem, with_line
from mirrorc.options.communication import Communication

_DOING = "mirrorc.compile"


class JointCompilation(AbstractContextManager["JointCompilation"]):
    """A context whose exceptions reach the other workers.

    Args:
        distributed: an invalid value counts as "auto".
        communication: an object of another type counts as the default; it is refused later, within the context.

    Raises:
        ValueError: on entering, if the description of the workers is wrong, or contradicts ``distributed``.
        CommunicationError: on entering, see `mirrorc.cluster.join`.
    """

    def __init__(self, distributed: Any, communication: Any) -> None:
        self._distributed = distributed
        self._communication = communication if isinstance(communication, Communication) else Communication()
        self.cluster: Cluster | None = None
        self.round: Round | None = None

    def __enter__(self) -> JointCompilation:
        self.cluster = self._joined_workers()
        if self.cluster is not None:
            self.round = self.cluster.begin(_DOING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self.round is not None:
            self.round.fail(error)

    def _joined_workers(self) -> Cluster | None:
        group = self._communication.process_group
        if self._distributed is False:
            if group is not None:
                why = "one names workers, and the other trains without them"
                fix = ("leave distributed=False out", "leave process_group= out")
                raise problem(ValueError, "MC1003: process_group= and distributed=False cannot be combined", why, fix)
            return None
        try:
            place = find_place(group)
        except ValueError as error:
            raise ValueError(
                with_line(str(error), "fix", "distributed=False, to train in this process alone")
            ) from None
        if place.num_workers > 1:
            return join(group, timeout=self._communication.timeout)
        if self._distributed is True:
            fix = ("torchrun --nproc-per-node=2 train.py", "leave distributed= out")
            raise problem(ValueError, "MC6101: distributed is True, but this process is the only worker", fix=fix)
        return None
