"""Progress of a worker, sent with each heartbeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_BEGUN, _MET, _READY, _ENDED = 0, 1, 2, 3


@dataclass(frozen=True, order=True)
class Progress:
    """A worker's progress in its training calls; later points compare as greater.

    Attributes:
        call: number of the call; 0 before the first.
        num_buckets: buckets sent in this call.
    """

    call: int = 0
    stage: int = _ENDED
    num_buckets: int = 0

    def begun(self, call: int) -> Progress:
        return Progress(call, _BEGUN)

    def met(self) -> Progress:
        return Progress(self.call, _MET)

    def sent(self) -> Progress:
        return Progress(self.call, self.stage, self.num_buckets + 1)

    def ready(self) -> Progress:
        return Progress(self.call, _READY, self.num_buckets)

    def ended(self) -> Progress:
        return Progress(self.call, _ENDED, self.num_buckets)

    def to_text(self) -> str:
        return f"{self.call} {self.stage} {self.num_buckets}"

    @staticmethod
    def from_text(text: str) -> Progress:
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
    """The rank of the straggler; None if several workers are equally far behind."""
    least = min(everyone.values())
    behind = [rank for rank, progress in everyone.items() if progress == least]
    return behind[0] if len(behind) == 1 else None
