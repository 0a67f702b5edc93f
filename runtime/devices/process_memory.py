"""The process's memory as the system sees it."""

from __future__ import annotations

import ctypes
import sys

_LARGEST_KEPT = 32 * 2**20 - 2**16  # bytes: more than that, glibc never keeps


def keep_what_is_freed() -> None:
    """Makes a C library that learns from the program keep blocks of up to 32 MB for the next step, not ask for them again.

    glibc puts a block of the size of the largest that it has seen freed on a heap, and gives a heap's end back when twice as much
    lies free there. Shown one of 32 MB once, it keeps what a step frees; else a convolutional net spends 5% of its steps in
    page faults. Nothing is set: a program that frees one large tensor does the same. Costs microseconds.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "malloc_trim"):
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free(libc.malloc(_LARGEST_KEPT))


def return_freed_memory() -> None:
    """Gives memory that was freed back to the system, if the C library is one that keeps it and can be told.

    glibc puts blocks of many megabytes on its heap once it has seen one of that size freed, and keeps there what is freed later.
    For moments after which much was freed for good, such as moving parameters or state; it takes milliseconds.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
