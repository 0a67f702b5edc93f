"""Controls how the C library keeps and returns the memory of the process."""

from __future__ import annotations

import ctypes
import sys

_LARGEST_KEPT = 32 * 2**20 - 2**16  # bytes: the largest block that glibc can be made to keep


def keep_what_is_freed() -> None:
    """Makes glibc keep freed blocks of up to 32 MB for the next step, instead of returning them to the system.

    glibc adapts to the largest block that the program has freed: it takes blocks of up to this size from a heap, and returns the
    end of a heap only when twice this size is free there. This function frees one block of 32 MB. From then on glibc keeps the
    memory that a step frees. Otherwise a convolutional net spends 5% of its steps in page faults. No setting is changed: any
    program that frees one large tensor has the same effect. Takes microseconds.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "malloc_trim"):
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free(libc.malloc(_LARGEST_KEPT))


def return_freed_memory() -> None:
    """Returns freed memory to the system, if the C library keeps it and has a function for that.

    Once the program has freed a large block, glibc allocates blocks of that size on its heap and keeps them when they are freed.
    To be called after much memory was freed for good, such as after parameters or state have moved. Takes milliseconds.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
