"""Makes ``out=`` arguments and results one object under Dynamo."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch


@contextlib.contextmanager
def returned_out_arguments() -> Iterator[None]:
    """Makes torch functions return the tensor of ``out=`` itself in traces of this thread.

    Dynamo returns a new variable, so ``self.u = torch.mul(a, b, out=self.u)`` seems to assign an attribute.
    """
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    thread, call = threading.get_ident(), TorchInGraphFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        result, out = call(self, tx, args, kwargs), kwargs.get("out")
        out = out.realize() if hasattr(out, "realize") else out
        is_out = isinstance(out, TensorVariable) and isinstance(result, TensorVariable)
        return out if is_out and threading.get_ident() == thread else result

    with patch.object(TorchInGraphFunctionVariable, "call_function", call_function):
        yield
