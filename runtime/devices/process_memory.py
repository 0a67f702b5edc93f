"""Control of the C library's cache of freed memory."""

from __future__ import annotations

import ctypes
import sys

_LARGEST_CACHED = 32 * 2**20 - 2**16  # bytes: the largest block that glibc can be made to keep
_HEAP_BYTES = 64 * 2**20  # of a heap of a thread
_M_TOP_PAD = -2  # of <malloc.h>


def cache_freed_memory() -> None:
    """Makes glibc cache freed blocks of up to 32 MB for the next step.

    Otherwise, a convolutional net spends 5% of its steps in page faults. glibc caches blocks up to the largest block
    freed so far, so this function frees one of 32 MB.

    A thread's heap has 64 MB. Unless ``M_TOP_PAD`` is as large, glibc returns free heaps to the system (``heap_trim``
    in malloc/arena.c). This costs a device with several heaps 8% of its steps.
    """
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "malloc_trim"):
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free(libc.malloc(_LARGEST_CACHED))
        libc.mallopt(_M_TOP_PAD, _HEAP_BYTES)  # from here on, glibc does not adapt the value


def return_freed_memory() -> None:
    """Returns cached memory to the system, after a large permanent release; takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))
