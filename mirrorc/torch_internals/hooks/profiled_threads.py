"""Extends torch's profiler to helper threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


def is_profiled() -> bool:
    return torch._C._autograd._profiler_enabled()


def seen_by_profiler(job: Callable[[], Any]) -> Callable[[], Any]:
    """Makes this thread's profiler record a job that another thread runs once, while this thread waits."""
    functions = _functions()
    if functions is None:
        return job
    debug_info, callbacks = functions.current_debug_info(), functions.callbacks()

    @functools.wraps(job)
    def run() -> Any:
        with _watched(functions, debug_info, callbacks):
            return job()

    return run


@contextlib.contextmanager
def _watched(functions: _Functions, debug_info: _SharedPointer, callbacks: int) -> Iterator[None]:
    before = functions.current_debug_info()
    functions.force_debug_info(ctypes.byref(debug_info))
    functions.set_callbacks(callbacks)
    try:
        yield
    finally:
        functions.clear_callbacks()
        functions.force_debug_info(ctypes.byref(before))


class _SharedPointer(ctypes.Structure):
    """A ``std::shared_ptr``, oversized so that every calling convention returns it through memory."""

    _fields_ = (("words", ctypes.c_void_p * 4),)


class _Functions:
    """C++ functions of ``at::ThreadLocalStateGuard``. ``force_debug_info`` empties its argument."""

    def __init__(self, core: ctypes.CDLL, torch_cpu: ctypes.CDLL) -> None:
        self.current_debug_info = core._ZN3c1020ThreadLocalDebugInfo7currentEv
        self.current_debug_info.restype, self.current_debug_info.argtypes = _SharedPointer, ()
        self.force_debug_info = core._ZN3c1020ThreadLocalDebugInfo22_forceCurrentDebugInfoESt10shared_ptrIS0_E
        self.force_debug_info.restype, self.force_debug_info.argtypes = None, (ctypes.c_void_p,)
        self.callbacks = torch_cpu._ZN2at24get_record_function_tls_Ev
        self.callbacks.restype, self.callbacks.argtypes = ctypes.c_void_p, ()
        self.set_callbacks = torch_cpu._ZN2at24set_record_function_tls_ERKNS_17RecordFunctionTLSE
        self.set_callbacks.restype, self.set_callbacks.argtypes = None, (ctypes.c_void_p,)
        self.clear_callbacks = torch_cpu._ZN2at25clearThreadLocalCallbacksEv
        self.clear_callbacks.restype, self.clear_callbacks.argtypes = None, ()


@functools.cache
def _functions() -> _Functions | None:
    """None if torch's libraries lack these names, as on Windows."""
    folder = Path(torch.__file__).parent / "lib"
    with contextlib.suppress(StopIteration, OSError, AttributeError):
        core, torch_cpu = (
            ctypes.CDLL(str(next(path for path in (folder / f"{name}.so", folder / f"{name}.dylib") if path.exists())))
            for name in ("libc10", "libtorch_cpu")
        )
        return _Functions(core, torch_cpu)
    return None
