"""Indices of scatters in vectorized kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch


@contextlib.contextmanager
def constant_indices_allowed() -> Iterator[None]:
    """Lets kernels of several threads add a vector to a single element, where an assertion of Inductor fails."""
    from torch._inductor.codegen.cpp import CppVecKernel
    from torch._inductor.ops_handler import WrapperHandler
    from torch._inductor.virtualized import V

    class VectorIndices(WrapperHandler):
        def index_expr(self, expression: Any, dtype: Any) -> Any:
            index = self._inner.index_expr(expression, dtype)
            return index if index.is_vec else V.kernel.broadcast(index)

    store_as_is = CppVecKernel.store

    def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> Any:
        with (
            V.set_ops_handler(VectorIndices(V.get_ops_handler())) if mode == "atomic_add" else contextlib.nullcontext()
        ):
            return store_as_is(self, name, index, value, mode)

    with patch.object(CppVecKernel, "store", store):
        yield
