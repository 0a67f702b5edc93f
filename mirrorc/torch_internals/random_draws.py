"""Observes which numbers a traced forward takes from Python's module ``random``; a graph would have them as constants."""

from __future__ import annotations

import contextlib
import random
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def observed_draws() -> Iterator[list[Sequence[traceback.FrameSummary]]]:
    """Observes the traces of this thread, and leaves the state of ``random`` as it was.

    Gives:
        The frames, outermost first, in which numbers were drawn.
    """
    from torch._dynamo.variables import misc, user_defined
    from torch._guards import TracingContext

    draw: Callable[..., Any] = user_defined.call_random_fn
    found: list[Sequence[traceback.FrameSummary]] = []
    thread, state = threading.get_ident(), random.getstate()

    def observed(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            found.append(list(TracingContext.extract_stack()))
        return draw(*args, **kwargs)

    modules: tuple[Any, ...] = (misc, user_defined)
    for module in modules:
        module.call_random_fn = observed
    try:
        yield found
    finally:
        for module in modules:
            module.call_random_fn = draw
        if found:
            random.setstate(state)
