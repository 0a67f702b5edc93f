"""Names of nodes."""

from __future__ import annotations

import itertools
import keyword as keywords
import re
from collections.abc import Collection, Mapping
from typing import Any

from mirrorc.ir.operation import operation_of


def of_replica(name: str, replica: int | None) -> str:
    return name if replica is None else f"{name}_r{replica}"


def of_all_replicas(name: str, replica: int | None) -> str:
    return name if replica is None else name.removesuffix(f"_r{replica}")


def identifier(path: str) -> str:
    name = re.sub(r"\W+", "_", path).strip("_") or "input"
    if keywords.iskeyword(name):
        return f"{name}_"
    return f"_{name}" if name[0].isdigit() else name


def unlike(taken: Collection[str], name: str) -> str:
    others = (f"{name}_{number}" for number in itertools.count(1))
    return name if name not in taken else next(other for other in others if other not in taken)


class _Keywords(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "None"


def filled(template: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Fills an operation's template with a node's keywords.

    ``{awaited}`` names the value that the wait returns, ``{part}`` the chunk and round, ``{pack}`` the pack of a cut
    bucket.
    """
    pack = f"_pack{kwargs['pack']}" if kwargs.get("pack") is not None else ""
    if "{part}" not in template and "{awaited}" not in template:
        return template.format_map(_Keywords({**kwargs, "pack": pack})) if "{" in template else template
    launch = operation_of(getattr(args[0], "target", None)) if args else None
    about = args[0].kwargs if launch is not None and launch.awaited else kwargs
    part = "".join(f"_{key}{about[key]}" for key in ("chunk", "round") if key in about)
    awaited = launch.awaited if launch is not None and launch.awaited else "value"
    return template.format_map(_Keywords({**kwargs, "pack": pack}, awaited="received" if part else awaited, part=part))
