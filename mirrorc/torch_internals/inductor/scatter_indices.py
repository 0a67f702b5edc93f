"""Indices at which vectorized kernels add."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch


@contextlib.contextmanager
def scatters_at_their_indices() -> Iterator[None]:
    """Corrects kernels of several threads that add to rows.

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

    def index_in_tile(self: Any, index: Any) -> Any:
        return index if index.has(self.inner_itervar()) else original_index(self, index)

    with (
        patch.object(CppVecKernel, "store", store),
        patch.object(CppTile2DKernel, "transform_indexing", index_in_tile),
    ):
        yield
