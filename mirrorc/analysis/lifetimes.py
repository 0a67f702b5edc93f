"""Finds when the results of regions' calls are read for the last time."""

from __future__ import annotations

from typing import Any

from torch import fx

from mirrorc.ir.nodes import is_region_call


def last_reader(part: fx.Node) -> fx.Node | None:
    """The last call that reads a part of a call's result, if regions alone read it; None if anything else does, or nothing.

    Nodes compare by their places in the graph. What a region makes of it is assumed to lie in other memory.
    """
    readers: list[Any] = list(part.users)
    return max(readers) if readers and all(is_region_call(reader) for reader in readers) else None
