"""Controls how the C library keeps and returns the memory of the process."""

from __future__ import annotations

import ctypes
import sys

_LARGEST_KEPT = 32 * 2**20 - 2**16  # bytes: the largest block that glibc can be made to keep
_HEAP_BYTES = 64 * 2**20  # of a heap of a thread
_M_TOP_PAD = -2  # of <malloc.h>


def keep_what_is_freed() -> None:
    """Makes glibc keep freed blocks of up to 32 MB for the next step, instead of returning them to the system.

    glibc adapts to the largest block that the program has freed: it takes blocks of up to this size from a heap, and returns the
    end of a heap only when twice this size is free there. This function frees one block of 32 MB. From then on glibc keeps the
    memory that a step frees. Otherwise a convolutional net spends 5% of its steps in page faults.

    A thread but the first one has heaps of 64 MB, and glibc returns one of them whenever all of it is free, unless its
    ``M_TOP_PAD`` is as large. It is set to that: a device whose activations take several heaps spends 8% of its steps in page
    faults otherwise. The first thread then takes addresses, no memory, for 64 MB more at a time.

    Takes microseconds. Source: ``heap_trim`` in glibc's malloc/arena.c.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "malloc_trim"):
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free(libc.malloc(_LARGEST_KEPT))
        libc.mallopt(_M_TOP_PAD, _HEAP_BYTES)  # glibc adapts no more from here on


def return_freed_memory() -> None:
    """Returns freed memory to the system, if the C library keeps it and has a function for that.

    Once the program has freed a large block, glibc allocates blocks of that size on its heap and keeps them when they are freed.
    To be called after much memory was freed for good, such as after parameters or state have moved. Takes milliseconds.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
