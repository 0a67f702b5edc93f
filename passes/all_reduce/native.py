"""All-reduce by the link itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from mirrorc.passes.all_reduce.algorithm import AllReduceAlgorithm


@dataclass(frozen=True)
class Native(AllReduceAlgorithm):
    """Leaves all-reduces to links: logical CPUs add in shared memory, GPUs use NCCL, other devices copy."""

    name: str = field(default="native", init=False)

    @property
    def changes_bits(self) -> str:
        return ""

    @property
    def sends(self) -> bool:
        return False
