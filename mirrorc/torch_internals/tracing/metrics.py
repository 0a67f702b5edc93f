"""Suppression of Dynamo's metrics where nobody reads them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from mirrorc.torch_internals.hooks.settings import is_structured_trace_on


@contextlib.contextmanager
def metrics_if_heard() -> Iterator[None]:
    """Has Dynamo report metrics only into a structured trace.

    The reports take as long as making the guards. Torch 2.11 would log an error because functions are among the settings.
    """
    from torch._dynamo.utils import get_metrics_context

    logger = logging.getLogger("torch._dynamo.metrics_context")
    was_disabled, context = logger.disabled, get_metrics_context()
    tell: Any = context._on_exit
    try:
        logger.disabled = True
        if not is_structured_trace_on():
            context._on_exit = lambda *_: None
        yield
    finally:
        logger.disabled, context._on_exit = was_disabled, tell


@contextlib.contextmanager
def guards_not_timed() -> Iterator[None]:
    """Keeps Dynamo from timing new guards, for which it empties the processor's caches (20 ms and more)."""
    from torch._dynamo import guards

    measure: Callable[..., float] = guards.profile_guard_manager
    guards.profile_guard_manager = lambda *_: 0.0
    try:
        yield
    finally:
        guards.profile_guard_manager = measure
