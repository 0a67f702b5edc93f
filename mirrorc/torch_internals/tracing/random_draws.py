"""Detects random numbers that steps would not draw anew."""

from __future__ import annotations

import contextlib
import random
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch


@contextlib.contextmanager
def observed_draws() -> Iterator[list[Sequence[traceback.FrameSummary]]]:
    """Collects the frames of random draws in traces of this thread. Restores ``random``."""
    from torch._dynamo.variables import misc, user_defined
    from torch._guards import TracingContext

    draw: Callable[..., Any] = user_defined.call_random_fn
    stacks: list[Sequence[traceback.FrameSummary]] = []
    thread, state = threading.get_ident(), random.getstate()

    def observed(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            stacks.append(list(TracingContext.extract_stack()))
        return draw(*args, **kwargs)

    try:
        with patch.object(misc, "call_random_fn", observed), patch.object(user_defined, "call_random_fn", observed):
            yield stacks
    finally:
        if stacks:
            random.setstate(state)


@contextlib.contextmanager
def observed_cached_draws() -> Iterator[list[Sequence[traceback.FrameSummary]]]:
    """Collects the frames, outermost first, of calls of cached random functions in traces of this thread.

    Such functions have ``functools.cache`` or ``lru_cache``, which Dynamo ignores.
    """
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable
    from torch._guards import TracingContext

    call = WrapperUserFunctionVariable.call_function
    stacks: list[Sequence[traceback.FrameSummary]] = []
    thread = threading.get_ident()

    def observed(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != thread or not hasattr(self.wrapper_obj, "cache_info"):
            return call(self, tx, args, kwargs)
        before, stack = set(tx.output.graph.nodes), list(TracingContext.extract_stack())
        result = call(self, tx, args, kwargs)
        if any(_is_random(node.target) for node in tx.output.graph.nodes if node not in before):
            stacks.append(stack)
        return result

    with patch.object(WrapperUserFunctionVariable, "call_function", observed):
        yield stacks


def _is_random(target: Any) -> bool:
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
