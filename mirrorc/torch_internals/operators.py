"""Replaces operators of torch while a block runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced_operators(replace: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Lets ``replace(operator, args, kwargs)`` give the result of operators that this thread runs, below autograd.

    Where it returns NotImplemented, the operator runs. Operators that ``replace`` itself runs are not replaced.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Replace(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = replace(func, args, kwargs or {})
            return func(*args, **(kwargs or {})) if result is NotImplemented else result

    with Replace():
        yield
