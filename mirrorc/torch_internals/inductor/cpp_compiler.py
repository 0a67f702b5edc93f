"""Changes when Inductor waits for the C++ compiler."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

_unfinished: contextvars.ContextVar[list[Callable[[], None]] | None] = contextvars.ContextVar(
    "unfinished", default=None
)


@contextlib.contextmanager
def kernels_compiled_together() -> Iterator[None]:
    """A context in which `compile_with_inductor` does not wait for the C++ compiler; its end waits for all kernels.

    The C++ compiler works while more regions are lowered. Compiled regions must not be called before the end of the context.

    If it fails, for lack of memory for example, Inductor forgets what it has loaded: a kernel that could not be compiled would
    fail again whenever it is asked for.

    Raises:
        Exception: at the end, what Inductor raises if a kernel cannot be compiled.
    """
    _let_waits_be_put_off()
    waits: list[Callable[[], None]] = []
    token = _unfinished.set(waits)
    try:
        try:
            yield
        finally:
            _unfinished.reset(token)
        for wait in waits:
            wait()
    except BaseException as error:
        if waits:
            forget_loaded_kernels()
        if isinstance(
            error, MemoryError | OSError | RuntimeError
        ):  # trials of instructions may have failed for the same reason
            forget_instructions()
        raise


def forget_loaded_kernels() -> None:
    """Lets Inductor load or compile every kernel anew. Functions that are in use stay."""
    from torch._inductor.utils import clear_inductor_caches

    clear_inductor_caches()


def forget_instructions() -> None:
    """Lets Inductor try the processor's vector instructions again."""
    from torch._inductor import cpu_vec_isa

    kinds = [cpu_vec_isa.VecISA]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for owner in (*kinds, cpu_vec_isa):
        for value in vars(owner).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    with _preparing:
        _prepared.clear()


@functools.cache
def _let_waits_be_put_off() -> None:
    """Lets the wait for kernels be postponed, with which each module that Inductor writes ends.

    This wait replaces the futures among the module's globals by the kernels.
    """
    from torch._inductor.async_compile import AsyncCompile

    wait_now = AsyncCompile.wait

    def wait(self: AsyncCompile, scope: dict[str, Any]) -> None:
        waits = _unfinished.get()
        if waits is None:
            wait_now(self, scope)
        else:
            waits.append(functools.partial(wait_now, self, scope))

    AsyncCompile.wait = wait  # type: ignore[method-assign]


def prepare_cpp_compiler() -> None:
    """Starts the work that Inductor does before its first kernel of a process in threads, so that capture can go on meanwhile.

    Inductor tries the processor's vector instructions one after the other. For each one, it compiles one or more files (which
    are cached) and loads them in a new process. A query for the instructions waits until all are tried. An error here is
    ignored: it occurs again, and is reported, when a kernel is compiled.
    """
    _let_instructions_be_tried_together()
    _instructions_tried(os.getpid())


_MOST_SECONDS = 120.0  # a compiler that takes longer hangs


@functools.cache
def _let_instructions_be_tried_together() -> None:
    """Makes queries for the instructions wait for the trials.

    A trial changes flags of its instructions for a while, so two threads must not try the same instructions at once.
    """
    from torch._inductor import cpu_vec_isa

    try_one_by_one = cpu_vec_isa.valid_vec_isa_list

    def valid_vec_isa_list() -> list[Any]:
        _instructions_tried(os.getpid()).wait(_MOST_SECONDS)  # then Inductor tries them itself
        return try_one_by_one()

    valid_vec_isa_list.cache_clear = try_one_by_one.cache_clear  # type: ignore[attr-defined]
    cpu_vec_isa.valid_vec_isa_list = valid_vec_isa_list  # type: ignore[assignment]


def _instructions_tried(process: int) -> threading.Event:
    """An event that is set when this process has tried the instructions; the first call starts the trials.

    It belongs to one process, because a forked child does not have the threads of its parent.
    """
    with _preparing:
        if process not in _prepared:
            _prepared.clear()
            _prepared[process] = _try_instructions()
        return _prepared[process]


_preparing, _prepared = threading.Lock(), dict[int, threading.Event]()


def _try_instructions() -> threading.Event:
    from torch._inductor import codecache, cpp_builder  # noqa: F401 - here, as several threads will ask for them
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

    known = set(x86_isa_checker())
    trials = [
        _started(functools.partial(bool, instructions))
        for instructions in supported_vec_isa_list
        if known.issuperset(str(instructions).split())
    ]
    is_tried = threading.Event()

    def tell() -> None:
        for trial in trials:
            trial.join()
        is_tried.set()

    _started(tell)
    return is_tried


def _started(job: Callable[[], Any]) -> threading.Thread:
    """Starts a daemon thread that does a job with the settings of the calling thread."""
    context = contextvars.copy_context()  # Inductor's settings are context variables

    def run() -> None:
        with contextlib.suppress(Exception):
            context.run(job)

    thread = threading.Thread(target=run, name="mirrorc C++ compiler", daemon=True)
    thread.start()
    return thread
