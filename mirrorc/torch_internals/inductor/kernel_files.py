"""Compiles without Inductor's cached files, and replaces corrupt ones."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mirrorc.torch_internals.inductor.cpp_compiler import forget_instructions, forget_loaded_kernels

_LOADED = (".py", ".so", ".cpp")


def kernel_folder() -> Path:
    from torch._inductor.runtime.runtime_utils import cache_dir

    return Path(cache_dir())


@contextlib.contextmanager
def fresh_kernel_files() -> Iterator[None]:
    """Hides the files of earlier compilations from Inductor.

    At the end, new files replace older ones that differ. A name determines the content, so a difference means
    corruption.
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
