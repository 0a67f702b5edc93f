"""Has Dynamo give back the tensor that a function of torch was given for its result, as Python does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def given_results() -> Iterator[None]:
    """While it lasts, functions of torch that are called with ``out=`` give that very tensor in traces of this thread.

    By itself, Dynamo gives another variable of the same memory, so that ``self.u = torch.mul(a, b, out=self.u)`` would seem to
    assign an attribute.
    """
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    thread, call = threading.get_ident(), TorchInGraphFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        found, out = call(self, tx, args, kwargs), kwargs.get("out")
        out = out.realize() if hasattr(out, "realize") else out
        is_given = isinstance(out, TensorVariable) and isinstance(found, TensorVariable)
        return out if is_given and threading.get_ident() == thread else found

    TorchInGraphFunctionVariable.call_function = call_function  # type: ignore[method-assign]
    try:
        yield
    finally:
        TorchInGraphFunctionVariable.call_function = call  # type: ignore[method-assign]
