"""The last reader of a region's result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from mirrorc.analysis.graph.aliases import origins, shared_by
from mirrorc.ir.nodes import is_compute, is_region_call, region_of
from mirrorc.ir.program import Region


def last_reader(part: fx.Node, regions: Mapping[str, Region]) -> fx.Node | None:
    """None if there is no reader; if a reader may return a view of ``part``; or if it is neither a region call nor a
    torch operator.
    """
    readers: list[Any] = list(part.users)
    return max(readers) if readers and all(_uses_up(reader, part, regions) for reader in readers) else None


def _uses_up(reader: fx.Node, part: fx.Node, regions: Mapping[str, Region]) -> bool:
    if not is_region_call(reader):
        return is_compute(reader) and not shared_by(reader)
    body = regions[region_of(reader)].graph_module.graph
    placeholders = body.find_nodes(op="placeholder")
    arguments = {placeholders[place] for place, source in enumerate(reader.args) if source is part}
    return all(arguments.isdisjoint(origins(result)) for result in body.output_node().all_input_nodes)
