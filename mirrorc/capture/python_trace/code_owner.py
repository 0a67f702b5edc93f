"""Says whose code runs: the user's, torch's, or that of one of Python's libraries."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from typing import Any

import torch

from mirrorc.torch_internals import is_users_file

_TORCHS = frozenset({"mpmath", "numpy", "sympy", "torchgen"})
"""What torch is made with."""

_IMPORTERS = frozenset({"_distutils_hack"})
"""Those of other makers that Python asks where a module is; it is the same for the same name."""

SAME_EACH_TIME = _TORCHS | _IMPORTERS
"""The libraries of other makers whose functions give the same in each call."""

_MADE = "<eval_with_key>"  # the file of code that torch makes of graphs

_INSTALLED = f"{os.sep}site-packages{os.sep}"
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_TORCH = f"{torch.__path__[0]}{os.sep}"


def is_watched_file(path: str) -> bool:
    """Whether code of a file is the user's."""
    return owner_of(path) is None


def is_made_by_library(path: str, its_globals: dict[str, Any]) -> bool:
    """Whether code without a file was made by a library, such as the constructors of its dataclasses."""
    if not path.startswith("<"):
        return False
    name = str(its_globals.get("__name__", "")).partition(".")[0]
    known = name in sys.stdlib_module_names and name != "__main__"
    return (
        known
        or name in _TORCHS
        or name in ("torch", "mirrorc")
        or path.startswith(_MADE)
        or name.startswith("namedtuple_")
    )


@lru_cache(maxsize=65536)
def owner_of(path: str) -> str | None:
    """The library that a file is of; empty if it is torch's or mirrorc's; None if it is the user's."""
    if path.startswith("<frozen "):
        return path.removeprefix("<frozen ").partition(".")[0].rstrip(">")
    if path.startswith("<"):  # of a shell or a notebook, or made by a library such as dataclasses
        return None
    if path.startswith(_TORCH):
        return ""
    if path.startswith(_STANDARD_LIBRARY) and _INSTALLED not in path:
        return path.removeprefix(_STANDARD_LIBRARY).split(os.sep)[0].removesuffix(".py")
    installed = path.rpartition(_INSTALLED)[2].split(os.sep)[0]
    if installed in _TORCHS or installed in _IMPORTERS:
        return installed
    return None if is_users_file(path) or path.startswith(torch.__path__[0]) else ""
