"""Has Dynamo trace a function of ours wherever the traced code calls a function of torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def traced_instead(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """While it lasts, traces of this thread enter other functions in place of functions of torch.

    Args:
        functions: for each function of torch, the Python function that is traced where it is called, with its arguments.
    """
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    kind: Any = TorchInGraphFunctionVariable
    call: Callable[..., Any] = kind.call_function
    thread = threading.get_ident()
    by_id: dict[int, Any] = {id(function): instead for function, instead in functions.items()}

    def substituted(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != thread or id(self.value) not in by_id:
            return call(self, tx, args, kwargs)
        return UserFunctionVariable(by_id[id(self.value)]).call_function(tx, args, kwargs)

    kind.call_function = substituted
    try:
        yield
    finally:
        kind.call_function = call
