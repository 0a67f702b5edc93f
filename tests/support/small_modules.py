"""Modules that are written where they are used."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Parts(nn.Module):
    """A module of layers, parameters and other attributes that its caller names; a subclass adds ``forward``."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def module_of(forward: Callable[..., Any], **parts: Any) -> Any:
    """The module of a ``forward`` that one line says, and of its parts."""
    return type("Small", (Parts,), {"forward": forward, "__module__": forward.__module__})(**parts)
