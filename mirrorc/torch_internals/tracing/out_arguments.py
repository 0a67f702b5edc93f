"""Identity of ``out=`` arguments and results under Dynamo."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def given_results() -> Iterator[None]:
    """In traces of this thread, torch functions return the very tensor of ``out=``.

    Dynamo returns another variable, so ``self.u = torch.mul(a, b, out=self.u)`` would seem to assign an attribute.
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
