"""Omission of GPU random states from joint export, as its graphs do not take them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def no_states_of_gpus() -> Iterator[None]:
    """Keeps AOTAutograd from making unused fake tensors for GPU generator states, 2% of a small compilation."""
    from torch._decomp.decompositions_for_rng import PhiloxState
    from torch._functorch import config

    def reset(self: Any) -> None:
        self.seed = self.base_offset = None
        self.relative_offset, self.offset_advanced_at_least_once = 0, False

    if config.functionalize_rng_ops:
        yield
        return
    made = PhiloxState.reset
    PhiloxState.reset = reset  # type: ignore[method-assign]
    try:
        yield
    finally:
        PhiloxState.reset = made  # type: ignore[method-assign]
