"""Names that can stand in Python code."""

from __future__ import annotations

import keyword as keywords
import re


def identifier(path: str) -> str:
    """A Python identifier for an argument's path: ``batch.x[0]`` becomes ``batch_x_0``."""
    name = re.sub(r"\W+", "_", path).strip("_") or "input"
    if keywords.iskeyword(name):
        return f"{name}_"
    return f"_{name}" if name[0].isdigit() else name
