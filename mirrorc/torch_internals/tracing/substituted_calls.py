"""Substitutes for torch's functions under Dynamo, and isinstance() on mirrorc's objects."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType
from typing import Any
from unittest.mock import patch


@contextlib.contextmanager
def traced_instead(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    """Makes traces of this thread enter substitutes for torch's functions."""
    from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    thread = threading.get_ident()
    by_id: dict[int, Any] = {id(function): instead for function, instead in functions.items()}

    def substituted(call: Callable[..., Any], attribute: str) -> Callable[..., Any]:
        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            instead = by_id.get(id(getattr(self, attribute)))
            if instead is None or threading.get_ident() != thread:
                return call(self, tx, args, kwargs)
            bound = self.self_args() if attribute == "fn" else []  # a method's object
            return UserFunctionVariable(instead).call_function(tx, [*bound, *args], kwargs)

        return call_function

    kinds: dict[Any, str] = {  # the attribute with the function; versions of torch differ in the kinds
        TorchInGraphFunctionVariable: "value",
        SkipFunctionVariable: "value",
        UserFunctionVariable: "fn",
    }
    patches = [
        patch.object(kind, "call_function", substituted(kind.call_function, name)) for kind, name in kinds.items()
    ]
    with contextlib.ExitStack() as stack:
        for replacement in patches:
            stack.enter_context(replacement)
        yield


@contextlib.contextmanager
def called_while_traced(functions: Collection[Callable[..., Any]]) -> Iterator[None]:
    """Makes traces of this thread call these Python functions with constants, without tracing them.

    A function must return a constant, or a function that is traced when it is called.
    """
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.functions import UserFunctionVariable

    thread, call = threading.get_ident(), UserFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn not in functions or threading.get_ident() != thread:
            return call(self, tx, args, kwargs)
        constants = {key: value.as_python_constant() for key, value in kwargs.items()}
        result = self.fn(*(arg.as_python_constant() for arg in args), **constants)
        return UserFunctionVariable(result) if isinstance(result, FunctionType) else ConstantVariable.create(result)

    with patch.object(UserFunctionVariable, "call_function", call_function):
        yield


@contextlib.contextmanager
def noted_calls(function: Callable[..., Any]) -> Iterator[list[int]]:
    """Collects the lines at which traces of this thread call a torch function."""
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    thread, lines, call = threading.get_ident(), list[int](), TorchInGraphFunctionVariable.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is function and threading.get_ident() == thread:
            lines.append(tx.lineno)
        return call(self, tx, args, kwargs)

    with patch.object(TorchInGraphFunctionVariable, "call_function", call_function):
        yield lines


@contextlib.contextmanager
def asked_for_class(kind: type) -> Iterator[None]:
    """Makes traces of this thread treat objects of ``kind`` as Python does.

    isinstance() uses ``__class__``, but Dynamo ignores it if given a tuple of classes. Attributes are looked up in
    ``kind``, but Dynamo looks them up in ``__class__``.
    """
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    thread, python_type = threading.get_ident(), UserDefinedObjectVariable.python_type
    looked_up: Any = getattr(UserDefinedObjectVariable, "lookup_class_mro_attr", None)  # older torch has none

    def class_of(self: Any) -> type:
        if self.value_type is not kind or threading.get_ident() != thread:
            return python_type(self)
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code is class_of.__code__:  # the patch of another class
            frame = frame.f_back
        return self.value.__class__ if frame.f_code.co_name == "call_isinstance" else python_type(self)

    def look_up(self: Any, name: str) -> Any:
        if self.value_type is kind and threading.get_ident() == thread:
            for base in kind.__mro__:
                if name in vars(base):
                    return vars(base)[name]
        return looked_up(self, name)

    methods: dict[str, Any] = {"python_type": class_of}
    if looked_up is not None:
        methods["lookup_class_mro_attr"] = look_up
    with patch.multiple(UserDefinedObjectVariable, **methods):
        yield


def traced_file() -> str:
    """The file of the code being traced; empty outside of a trace."""
    from torch._guards import TracingContext

    stack = TracingContext.extract_stack()
    return stack[-1].filename if stack else ""
