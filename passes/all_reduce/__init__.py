"""All-reduce algorithms, one file each; `ALGORITHMS` lists them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mirrorc.passes.all_reduce.algorithm import AllReduceAlgorithm
from mirrorc.passes.all_reduce.auto import Auto
from mirrorc.passes.all_reduce.halving_doubling import HalvingDoubling
from mirrorc.passes.all_reduce.hierarchical_copy import HierarchicalCopy
from mirrorc.passes.all_reduce.native import Native
from mirrorc.passes.all_reduce.reduce_to_one import ReduceToOne
from mirrorc.passes.all_reduce.ring import Ring
from mirrorc.passes.all_reduce.round_robin import RoundRobin
from mirrorc.passes.all_reduce.traffic import Held, Traffic
from mirrorc.passes.all_reduce.tree import Tree

__all__ = [
    "ALGORITHMS", "AllReduceAlgorithm", "Auto", "HalvingDoubling", "Held", "HierarchicalCopy", "Native",
    "ReduceToOne", "Ring", "RoundRobin", "Traffic", "Tree",
]  # fmt: skip

ALGORITHMS: Mapping[str, type[AllReduceAlgorithm]] = MappingProxyType(
    {
        algorithm().name: algorithm
        for algorithm in (Native, ReduceToOne, HierarchicalCopy, Ring, HalvingDoubling, Tree, RoundRobin, Auto)
    }
)
"""All algorithms by name, as in ``algorithm`` of `mirrorc.Communication`."""
