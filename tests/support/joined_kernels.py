"""Compiles Inductor's C++ kernels of a process together and unoptimized, in a tenth of the time; for many small graphs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache

_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"


class JoinedKernel:
    """Is compiled when it is first called, with all others that wait for it."""

    waiting: ClassVar[list[JoinedKernel]] = []

    def __init__(self, argument_types: Sequence[str], source: str) -> None:
        assert all(kind == "int64_t" or kind.endswith("*") for kind in argument_types), argument_types
        self.argument_types, self.source = argument_types, source
        self.number = len(self.waiting)
        self.library: Any = None
        self.waiting.append(self)

    def __call__(self, *arguments: torch.Tensor | int) -> None:
        if self.library is None:
            self._compile()
        values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
        self.library(self.number, torch.tensor(values))

    def _compile(self) -> None:
        kernels = "\n".join(kernel._numbered for kernel in self.waiting)
        calls = "\n".join(kernel._call for kernel in self.waiting)
        switch = f'extern "C" void kernel(int64_t number, int64_t* values) {{ switch (number) {{\n{calls}\n}} }}'
        library = CppPythonBindingsCodeCache.load_pybinding(["int64_t", "int64_t*"], f"{_HEADER}\n{kernels}\n{switch}")
        for kernel in self.waiting:
            kernel.library = library
        self.waiting.clear()

    @property
    def _numbered(self) -> str:
        return self.source.replace(" kernel(", f" kernel_{self.number}(", 1)

    @property
    def _call(self) -> str:
        values = (f"({kind}) values[{place}]" for place, kind in enumerate(self.argument_types))
        return f"case {self.number}: return kernel_{self.number}({', '.join(values)});"


def join_kernels() -> None:
    """Changes Inductor for the rest of the process."""
    os.environ["TORCHINDUCTOR_DEBUG_COMPILE"] = "1"  # -O0
    config.compile_threads = 1
    config.fx_graph_cache = False  # graphs are drawn once
    AsyncCompile.cpp_pybinding = lambda _, *kernel: JoinedKernel(*kernel)  # type: ignore[assignment,method-assign]


def vectorize(kernels: bool) -> None:
    """Lets kernels that are compiled from now on use vector instructions, which takes Inductor longer."""
    config.cpp.simdlen = None if kernels else 1
