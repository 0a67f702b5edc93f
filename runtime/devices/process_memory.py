"""Control of the C library's cache of freed memory."""

from __future__ import annotations

import ctypes
import sys

_LARGEST_CACHED = 32 * 2**20 - 2**16  # bytes: the largest block that glibc can be made to keep
_HEAP_BYTES = 64 * 2**20  # of a heap of a thread
_M_TOP_PAD = -2  # of <malloc.h>


def cache_freed_memory() -> None:
    """Makes glibc cache freed blocks of up to 32 MB for the next step.

    glibc adapts to the largest freed block. Blocks of up to this size come from a heap, and the end of a heap returns
    to the system only when twice this size is free there. This function frees one block of 32 MB. Otherwise a
    convolutional net spends 5% of its steps in page faults.

    Other threads have heaps of 64 MB, and glibc returns a fully free heap, unless its ``M_TOP_PAD`` is as large
    (``heap_trim`` in glibc's malloc/arena.c): else a device with several heaps spends 8% of its steps in page faults.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "malloc_trim"):
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free(libc.malloc(_LARGEST_CACHED))
        libc.mallopt(_M_TOP_PAD, _HEAP_BYTES)  # glibc adapts no more from here on


def return_freed_memory() -> None:
    """Returns cached freed memory to the system, after a large permanent release; takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
