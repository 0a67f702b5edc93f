"""When Inductor waits for the C++ compiler."""

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
    """Within, `compile_with_inductor` does not wait for the C++ compiler, which works while more is lowered; its end does.

    What `compile_with_inductor` gives must not be called before the end.

    Raises:
        Exception: at the end, what Inductor raises if a kernel cannot be compiled.
    """
    _let_waits_be_put_off()
    waits: list[Callable[[], None]] = []
    token = _unfinished.set(waits)
    try:
        yield
    finally:
        _unfinished.reset(token)
    for wait in waits:
        wait()


@functools.cache
def _let_waits_be_put_off() -> None:
    """Inductor's modules end with a wait for their kernels, which takes the place of each among their globals."""
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
    """Begins, in threads, what Inductor would do before its first kernel of a process, so that capturing goes on meanwhile.

    Inductor tries the processor's vector instructions one after the other, each with a file or more that it compiles (once for
    a cache) and loads in a process of its own. Who asks Inductor for its instructions waits until all are tried. What fails
    here fails again, and is said, when a kernel is compiled.
    """
    _let_instructions_be_tried_together()
    _instructions_tried(os.getpid())


_MOST_SECONDS = 120.0  # a compiler that takes longer hangs


@functools.cache
def _let_instructions_be_tried_together() -> None:
    """A trial changes its instructions' flags for a while, so that no other thread may try them at the same time."""
    from torch._inductor import cpu_vec_isa

    try_one_by_one = cpu_vec_isa.valid_vec_isa_list

    def valid_vec_isa_list() -> list[Any]:
        _instructions_tried(os.getpid()).wait(_MOST_SECONDS)  # then Inductor tries them itself
        return try_one_by_one()

    cpu_vec_isa.valid_vec_isa_list = valid_vec_isa_list  # type: ignore[assignment]


def _instructions_tried(process: int) -> threading.Event:
    """Set when a process has tried them, which begins with the first call: threads do not live on in what is forked."""
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
    """A thread that does a job with the settings of its maker, and ends with the process."""
    context = contextvars.copy_context()  # Inductor's settings are context variables

    def run() -> None:
        with contextlib.suppress(Exception):
            context.run(job)

    thread = threading.Thread(target=run, name="mirrorc C++ compiler", daemon=True)
    thread.start()
    return thread
