"""Chooses an all-reduce algorithm for each bucket."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.links import link_named
from mirrorc.ir.program import Program
from mirrorc.passes.all_reduce.algorithm import AllReduceAlgorithm
from mirrorc.passes.all_reduce.halving_doubling import HalvingDoubling
from mirrorc.passes.all_reduce.native import Native
from mirrorc.passes.all_reduce.ring import Ring
from mirrorc.passes.all_reduce.tree import Tree
from mirrorc.printing.printed_values import size_text


@dataclass(frozen=True)
class Auto(AllReduceAlgorithm):
    """Chooses an algorithm for each bucket, with a reason.

    It takes the native sum with NCCL, in shared memory, for two devices, and where not every device needs the whole
    sum. Otherwise it takes a tree for small buckets (few messages), and halving-doubling or a ring for large ones (few
    bytes).

    Attributes:
        small_bytes: the size up to which latency exceeds transfer time.
        exact_order: use native sums, because they add in the order of replicas.
    """

    small_bytes: int = 2**16
    exact_order: bool = False
    name: str = field(default="auto", init=False)

    def __post_init__(self) -> None:
        if isinstance(self.small_bytes, bool) or not isinstance(self.small_bytes, int):
            raise TypeError(
                f"MC1001: small_bytes is {self.small_bytes!r}: give a whole number of bytes, 0 if none is small"
            )
        if self.small_bytes < 0:
            raise ValueError(f"MC1002: small_bytes is {self.small_bytes}: give a number of bytes, 0 if none is small")
        if not isinstance(self.exact_order, bool):
            raise TypeError(
                f"MC1001: exact_order is {self.exact_order!r}: say True, for the order of replicas, or False"
            )

    @property
    def changes_bits(self) -> str:
        return "" if self.exact_order else super().changes_bits

    @property
    def sends(self) -> bool:
        """False: the algorithm of each bucket decides."""
        return False

    def chosen_for(self, program: Program, launch: fx.Node) -> tuple[AllReduceAlgorithm, str]:
        link, count = link_named(launch.kwargs["link"]), program.num_replicas
        if self.exact_order:
            return Native(), "exact_order=True asks for the order of replicas"
        if launch.target is ops.reduce:
            return Native(), "each sum goes to the device that owns its parameters, and to no other"
        if link.moves_by_itself:
            return Native(), f"the link {link.name} sums up by itself, while devices compute"
        if link.reads_shared_memory:
            return Native(), "devices read each other's buckets in the memory that they share, so nothing is sent"
        if launch.target is ops.reduce_scatter:
            return (
                Native(),
                "each device copies the others' parts of its share alone, which is the least that is possible",
            )
        if count == 2:
            return Native(), "two devices send each other their buckets, which is the least that is possible"
        num_bytes = launch.all_input_nodes[0].meta["val"].nbytes
        if num_bytes <= self.small_bytes:
            return Tree(), f"up to {size_text(self.small_bytes)}, few messages count more than few bytes"
        if count & (count - 1) == 0:
            return (
                HalvingDoubling(),
                f"above {size_text(self.small_bytes)} it sends least, in fewer messages than a ring",
            )
        return Ring(), f"above {size_text(self.small_bytes)} it sends least; {count} devices are no power of two"
