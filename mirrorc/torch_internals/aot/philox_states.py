"""Keeps joint export from making states of random numbers on GPUs, which its graphs do not take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def no_states_of_gpus() -> Iterator[None]:
    """A block in which AOTAutograd makes no tensors for the states of GPUs' generators, unless its graphs are to have them.

    It makes six fake ones when an export begins, and six more when its contexts end, which takes 2% of a small compilation.
    """
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
