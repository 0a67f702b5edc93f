"""The process's memory as the system sees it."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Gives memory that was freed back to the system, if the C library is one that keeps it and can be told.

    glibc puts blocks of many megabytes on its heap once it has seen one of that size freed, and keeps there what is freed later.
    For moments after which much was freed for good, such as moving parameters or state; it takes milliseconds.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
