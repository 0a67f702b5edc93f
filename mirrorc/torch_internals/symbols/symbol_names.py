"""The names of torch's symbols for sizes: numbers in the order in which symbols are made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def symbols_by_number() -> Iterator[None]:
    """While a call is traced, names symbols ``s0``, ``s1``, ... in the order of the arguments, and gives each size its own.

    Otherwise Dynamo names them by a hash, and gives sizes that happen to be equal one symbol.
    """
    from torch.fx.experimental import _config

    with numbered_by(None), _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def numbered_by(number: Callable[[], int] | None) -> Iterator[None]:
    """While symbols are made, the number in the name of each; None to count them."""
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
