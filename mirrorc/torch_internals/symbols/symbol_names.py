"""Names of torch's size symbols: numbers in the order of their creation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def symbols_by_number() -> Iterator[None]:
    """In a trace, names symbols ``s0``, ``s1``, ... in the order of the arguments, with a symbol for each size.

    Dynamo would name them by a hash, and share a symbol among equal sizes.
    """
    from torch.fx.experimental import _config

    with numbered_by(None), _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def numbered_by(number: Callable[[], int] | None) -> Iterator[None]:
    """Sets the numbers in the names of new symbols; None counts them."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    before: Any = getattr(ShapeEnv, "_generate_unique_id", None)

    def next_id(self: Any, source_name: str) -> int:
        found = len(self.unique_ids) if number is None else number()
        self.unique_ids.add(found)
        return found

    if before is not None:
        ShapeEnv._generate_unique_id = next_id  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is not None:
            ShapeEnv._generate_unique_id = before  # type: ignore[method-assign]
