"""Ways to change a valid program, in one table: `KINDS`."""

from mutations import (
    bodies,
    buckets,
    checks,
    collectives,
    harmless,
    layouts,
    packs,
    sends,
    tables,
    updates,
    values,
    views,
)
from mutations.table import KINDS, Kind

__all__ = [
    "KINDS", "Kind", "bodies", "buckets", "checks", "collectives", "harmless", "layouts", "packs", "sends", "tables", "updates",
    "values", "views",
]  # fmt: skip
