"""Fills the templates by which operations name their nodes and their values in print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mirrorc.ir.operation import operation_of


class _Words(dict[str, Any]):
    """Keywords for a template; a keyword that a malformed node lacks reads as ``None``."""

    def __missing__(self, key: str) -> str:
        return "None"


def filled(template: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Fills a template of an operation with a node's keywords.

    ``{awaited}`` stands for the name of the value that the launch gives. ``{part}`` stands for the chunk and the round of the
    bucket, which are those of the node or of its launch, and ``{pack}`` for the pack, where buckets are cut.
    """
    pack = f"_pack{kwargs['pack']}" if kwargs.get("pack") is not None else ""
    if "{part}" not in template and "{awaited}" not in template:
        return template.format_map(_Words({**kwargs, "pack": pack})) if "{" in template else template
    launch = operation_of(getattr(args[0], "target", None)) if args else None
    about = args[0].kwargs if launch is not None and launch.awaited else kwargs
    part = "".join(f"_{key}{about[key]}" for key in ("chunk", "round") if key in about)
    awaited = launch.awaited if launch is not None and launch.awaited else "value"
    return template.format_map(_Words({**kwargs, "pack": pack}, awaited="received" if part else awaited, part=part))
