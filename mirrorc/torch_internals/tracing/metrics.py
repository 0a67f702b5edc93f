"""Keeps Dynamo from taking and telling metrics that nobody reads."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from mirrorc.torch_internals.hooks.settings import is_structured_trace_on


@contextlib.contextmanager
def metrics_if_heard() -> Iterator[None]:
    """A block after which Dynamo tells its metrics only if torch writes a structured trace, which they are for.

    It would write all its settings into each, once for a trace and once more for its guards, which takes as long as making the
    guards does. Where it tells them, torch 2.11 must not report an error because functions are among the settings.
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
    """Keeps Dynamo from timing new guards for its log: it empties the processor's caches for that, which takes 20 ms and more."""
    from torch._dynamo import guards

    measure: Callable[..., float] = guards.profile_guard_manager
    guards.profile_guard_manager = lambda *_: 0.0
    try:
        yield
    finally:
        guards.profile_guard_manager = measure
