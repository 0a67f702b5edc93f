"""Postpones Inductor's waits for the C++ compiler, and replaces its corrupt files."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_unfinished: contextvars.ContextVar[list[Callable[[], None]] | None] = contextvars.ContextVar(
    "unfinished", default=None
)


@contextlib.contextmanager
def kernels_compiled_together() -> Iterator[None]:
    """Postpones `compile_with_inductor`'s waits for the C++ compiler to the end of the context.

    Compiled regions must not be called before the end of the context, which raises Inductor's errors. After a failure,
    Inductor's loaded kernels are cleared, so that later requests can succeed.
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
        if isinstance(error, MemoryError | OSError | RuntimeError):  # the trials may have failed for the same reason
            forget_instructions()
        raise


def forget_loaded_kernels() -> None:
    from torch._inductor.utils import clear_inductor_caches

    clear_inductor_caches()


def forget_instructions() -> None:
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
    """Patches the wait at the end of each of Inductor's modules, which replaces futures by kernels."""
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
    """Prepares Inductor for a process's first kernel, in threads beside the capture.

    The slow part is the trial of vector instructions, each of which compiles a cached file and loads it in a new
    process. Errors are ignored, because compiling a kernel raises them again.
    """
    _let_instructions_be_tried_together()
    _instructions_tried(os.getpid())


_MOST_SECONDS = 120.0  # a slower compiler hangs


@functools.cache
def _let_instructions_be_tried_together() -> None:
    """Makes Inductor wait for the threads of trials. A trial changes flags, so no two may try the same instructions."""
    from torch._inductor import cpu_vec_isa

    try_serially = cpu_vec_isa.valid_vec_isa_list

    def valid_vec_isa_list() -> list[Any]:
        _instructions_tried(os.getpid()).wait(_MOST_SECONDS)  # after that, Inductor tries them
        return try_serially()

    valid_vec_isa_list.cache_clear = try_serially.cache_clear  # type: ignore[attr-defined]
    cpu_vec_isa.valid_vec_isa_list = valid_vec_isa_list  # type: ignore[assignment]


def _instructions_tried(process: int) -> threading.Event:
    """A forked child gets a new event, because it lacks the parent's threads."""
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
    context = contextvars.copy_context()  # Inductor's settings are context variables

    def run() -> None:
        with contextlib.suppress(Exception):
            context.run(job)

    thread = threading.Thread(target=run, name="mirrorc C++ compiler", daemon=True)
    thread.start()
    return thread


_LOADED = (".py", ".so", ".cpp")


def kernel_folder() -> Path:
    from torch._inductor.runtime.runtime_utils import cache_dir

    return Path(cache_dir())


@contextlib.contextmanager
def fresh_kernel_files() -> Iterator[None]:
    """Hides the files of earlier compilations from Inductor.

    At the end, new files replace older ones that differ. A name determines the content: a difference is corruption.
    """
    from torch._inductor.utils import fresh_inductor_cache

    cached = kernel_folder()
    forget_loaded_kernels()
    forget_instructions()
    with tempfile.TemporaryDirectory(prefix="mirrorc-kernels-", ignore_cleanup_errors=True) as place:
        with fresh_inductor_cache(dir=place, delete=False):
            yield
        (fresh,) = Path(place).iterdir()
        for made in fresh.rglob("*"):
            if made.suffix in _LOADED:
                with contextlib.suppress(OSError):  # the next caller tries again
                    _mend(cached / made.relative_to(fresh), made)


def _mend(file: Path, made: Path) -> None:
    if not file.exists() or file.read_bytes() == made.read_bytes():
        return
    new = file.with_name(f".mirrorc-{os.getpid()}-{file.name}")
    try:
        shutil.copy2(made, new)
        os.replace(new, file)
    finally:
        new.unlink(missing_ok=True)
