"""Indices at which vectorized kernels add."""

from __future__ import annotations

import contextlib
import functools
from typing import Any


@functools.cache
def correct_scatter_indices() -> None:
    """Corrects kernels of several threads that add to elements, in this process and for all who use Inductor.

    A vector that is added to a single element fails an assertion (pytorch#160391). In loops with tiles, which transpose,
    Inductor counts the place within a tile twice, and so writes to other elements, or past the end (pytorch#191837).
    """
    from torch._inductor.codegen.cpp import CppTile2DKernel, CppVecKernel
    from torch._inductor.ops_handler import WrapperHandler
    from torch._inductor.virtualized import V

    class VectorIndices(WrapperHandler):
        def index_expr(self, expression: Any, dtype: Any) -> Any:
            index = self._inner.index_expr(expression, dtype)
            return index if index.is_vec else V.kernel.broadcast(index)

    original_store, original_index = CppVecKernel.store, CppTile2DKernel.transform_indexing

    def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> Any:
        with (
            V.set_ops_handler(VectorIndices(V.get_ops_handler())) if mode == "atomic_add" else contextlib.nullcontext()
        ):
            return original_store(self, name, index, value, mode)

    def transform_indexing(self: Any, index: Any) -> Any:
        return index if index.has(self.inner_itervar()) else original_index(self, index)

    CppVecKernel.store = store  # type: ignore[method-assign]
    CppTile2DKernel.transform_indexing = transform_indexing  # type: ignore[method-assign]
