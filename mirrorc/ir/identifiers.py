"""Names of nodes: those that can stand in Python code, and those of one node on every replica."""

from __future__ import annotations

import keyword as keywords
import re


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
