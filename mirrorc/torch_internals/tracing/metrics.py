"""Suppresses Dynamo's metrics unless a trace collects them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from unittest.mock import patch

from mirrorc.torch_internals.hooks.settings import is_structured_trace_on


@contextlib.contextmanager
def metrics_if_heard() -> Iterator[None]:
    """Makes Dynamo report metrics only into a structured trace.

    Reports take as long as building guards, and torch 2.11 logs an error about function-valued settings.
    """
    from torch._dynamo.utils import get_metrics_context

    context = get_metrics_context()
    report = context._on_exit if is_structured_trace_on() else lambda *_: None
    with (
        patch.object(logging.getLogger("torch._dynamo.metrics_context"), "disabled", True),
        patch.object(context, "_on_exit", report),
    ):
        yield


@contextlib.contextmanager
def guards_not_timed() -> Iterator[None]:
    """Keeps Dynamo from timing new guards, because this flushes the processor's caches (20 ms and more)."""
    from torch._dynamo import guards

    with patch.object(guards, "profile_guard_manager", lambda *_: 0.0):
        yield
