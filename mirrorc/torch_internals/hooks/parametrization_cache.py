"""The cache of `torch.nn.utils.parametrize.cached`, which all threads share."""

from __future__ import annotations

import torch
from torch.nn.utils import parametrize


def parametrization_cache() -> dict[tuple[int, str], torch.Tensor | None]:
    """The current cache; it is replaced at the end of ``cached()``."""
    cache: dict[tuple[int, str], torch.Tensor | None] = parametrize._cache
    return cache


def caches_parametrizations() -> bool:
    return bool(parametrize._cache_enabled)
