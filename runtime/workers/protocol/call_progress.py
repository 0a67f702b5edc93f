"""How far a worker has come, as it tells the others with each sign of life."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_BEGUN, _MET, _READY, _ENDED = 0, 1, 2, 3


@dataclass(frozen=True, order=True)
class Progress:
    """How far a worker is in its training calls; who is further is greater.

    Attributes:
        call: the number of its last training call; 0 before the first.
        stage: in this call.
        num_buckets: that it has sent in this call.
    """

    call: int = 0
    stage: int = _ENDED
    num_buckets: int = 0

    def begun(self, call: int) -> Progress:
        """At the beginning of a call."""
        return Progress(call, _BEGUN)

    def met(self) -> Progress:
        """When all have begun the call."""
        return Progress(self.call, _MET)

    def sent(self) -> Progress:
        """When one more bucket is sent."""
        return Progress(self.call, self.stage, self.num_buckets + 1)

    def ready(self) -> Progress:
        """When it is ready to commit, and tells the others so."""
        return Progress(self.call, _READY, self.num_buckets)

    def ended(self) -> Progress:
        """When the call has ended."""
        return Progress(self.call, _ENDED, self.num_buckets)

    def to_text(self) -> str:
        """As it is told."""
        return f"{self.call} {self.stage} {self.num_buckets}"

    @staticmethod
    def from_text(text: str) -> Progress:
        """What `to_text` has told."""
        return Progress(*map(int, text.split()))

    def __str__(self) -> str:
        if self.stage == _BEGUN:
            return f"at the beginning of training call {self.call}"
        if self.stage == _ENDED:
            return (
                f"between training calls {self.call} and {self.call + 1}"
                if self.call
                else "before its first training call"
            )
        buckets = f"{self.num_buckets} bucket{'s' * (self.num_buckets != 1)}"
        ready = ", ready to commit" if self.stage == _READY else ""
        return f"in training call {self.call}, with {buckets} sent{ready}"


def least_far(everyone: Mapping[int, Progress]) -> int | None:
    """The rank of the worker that is behind all others; None if several are."""
    least = min(everyone.values())
    behind = [rank for rank, own in everyone.items() if own == least]
    return behind[0] if len(behind) == 1 else None
