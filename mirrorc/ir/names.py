"""Names of nodes: those that can stand in Python code, and those of one node on every replica."""

from __future__ import annotations

import itertools
import keyword as keywords
import re
from collections.abc import Collection


def of_replica(name: str, replica: int | None) -> str:
    """What a node is called on a replica, where all replicas have one of this name; None where there is but one."""
    return name if replica is None else f"{name}_r{replica}"


def of_all_replicas(name: str, replica: int | None) -> str:
    """The name that `of_replica` was given for this replica's node. Nothing may follow from it but another name."""
    return name if replica is None else name.removesuffix(f"_r{replica}")


def identifier(path: str) -> str:
    """A Python identifier for an argument's path: ``batch.x[0]`` becomes ``batch_x_0``."""
    name = re.sub(r"\W+", "_", path).strip("_") or "input"
    if keywords.iskeyword(name):
        return f"{name}_"
    return f"_{name}" if name[0].isdigit() else name


def unlike(taken: Collection[str], name: str) -> str:
    """A name that is none of those taken: variables ``a.b`` and ``a_b`` and an argument ``a_b`` have one identifier."""
    others = (f"{name}_{number}" for number in itertools.count(1))
    return name if name not in taken else next(other for other in others if other not in taken)
