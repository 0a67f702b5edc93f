"""Registers operators of mirrorc with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("mirrorc", "FRAGMENT")
FIXED_STRIDES = (torch.Tag.needs_fixed_stride_order,)


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    tags: Sequence[torch.Tag] = (),
    gradient: Callable[..., Any] | None = None,
    keep: Callable[..., None] | None = None,
) -> Any:
    """``fake`` runs the operator on fake tensors; ``gradient`` is its backward, for which ``keep`` saves inputs."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mirrorc::{name}", fake, lib=_LIBRARY)
    if gradient is not None:
        torch.library.register_autograd(f"mirrorc::{name}", gradient, setup_context=keep, lib=_LIBRARY)
    return getattr(torch.ops.mirrorc, name).default
