"""One call of `mirrorc.compile` on several workers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from numbers import Real
from types import TracebackType
from typing import Any

from mirrorc.cluster import Cluster, Round, find_place, join
from mirrorc.ir.workers import World
from mirrorc.options.tf_communication import CommunicationOptions

_DOING = "mirrorc.compile"


class JointCompilation(AbstractContextManager["JointCompilation"]):
    """A context around one call of `mirrorc.compile`, whose errors reach the other workers.

    Raises:
        TypeError, ValueError: on entering, if arguments that name the workers are wrong, or ``workers=None`` comes with
            a group.
        CommunicationError: on entering, see `mirrorc.cluster.join`.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self.cluster: Cluster | None = None
        self.round: Round | None = None

    def __enter__(self) -> JointCompilation:
        self.cluster = _joined_workers(self._arguments)
        if self.cluster is not None:
            self.round = self.cluster.begin(_DOING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self.round is not None:
            self.round.fail(error)


def _joined_workers(arguments: Mapping[str, Any]) -> Cluster | None:
    group = arguments["process_group"]
    if isinstance(arguments["world"], World):
        return None
    if arguments["workers"] is None:
        if group is not None:
            raise ValueError(
                "process_group= names workers, and workers=None trains without others: leave out one of them"
            )
        return None
    try:
        place = find_place(group)
    except ValueError as error:
        raise ValueError(f"{error}; or give workers=None, to train in this process alone") from None
    return None if place.num_workers == 1 else join(group, **_longest_wait(arguments))


def _longest_wait(arguments: Mapping[str, Any]) -> dict[str, float]:
    """Empty if the timeout is invalid, which the context reports later."""
    options = arguments["communication_options"]
    timeout = options.timeout_seconds if isinstance(options, CommunicationOptions) else None
    seconds: Any = arguments["timeout_seconds"] if timeout is None else timeout
    is_time = isinstance(seconds, Real) and not isinstance(seconds, bool) and float(seconds) > 0
    return {"timeout_seconds": float(seconds)} if is_time else {}
