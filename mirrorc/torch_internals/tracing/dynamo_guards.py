"""Checks Dynamo's guards, without those on state checked elsewhere, and guards that Dynamo lacks."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import (
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    WrapperDescriptorType,
)
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from mirrorc.torch_internals.aot.joint_graph import NumberInput
from mirrorc.torch_internals.hooks.settings import is_structured_trace_on
from mirrorc.torch_internals.numbers.drawn_numbers import DrawnNumbers, Generators, is_drawn
from mirrorc.torch_internals.numbers.number_trace import HostNumbers, is_ordinary, plain_number
from mirrorc.torch_internals.tracing.source_names import in_users_words, source_words

_VARIABLE = re.compile(r"^L\['self'\](\._modules\['[^']+'\])+\._(parameters|buffers)\['[^']+'\]$")
_MODULE_ATTRIBUTE = re.compile(r"^L\['self'\](\._modules\['[^']+'\])*\.\w+$")
_LEFT_OUT = ("GLOBAL_STATE", "SHAPE_ENV", "TORCH_FUNCTION_STATE")  # number of threads, sizes of arguments, modes


class DynamoGuards:
    """Checks that a call of a module would be traced to the same graph again.

    Other code checks arguments, parameters, buffers and hooks of submodules, and torch's modes. This class adds guards
    that Dynamo lacks: on identities of outside tensors, hooks of outside modules, methods of the classes in use, the
    sign of zeros, and `os.environ`.

    Attributes:
        names: the guarded expressions, from ``L['self']`` or globals ``G``.
        drawn: the inputs from random draws, or None; `hold` draws new numbers for the next step.
    """

    def __init__(
        self,
        manager: Any,
        module: nn.Module,
        traced_code: Sequence[CodeType],
        names: Sequence[str],
        inputs: HostNumbers | None = None,
        drawn: DrawnNumbers | None = None,
    ) -> None:
        self.names = frozenset(names)
        self._manager = manager
        self._has_gradients = torch.is_grad_enabled()  # in the trace
        self._scope = scope_of_guards(module)
        self._values = self._scope["L"]
        self.inputs = inputs
        self.drawn = drawn if drawn is not None and drawn.calls else None
        taken = inputs.sources if inputs is not None else ()
        values = {name: value for name in names for value in _evaluated(name, self._scope)}
        self._methods = TracedMethods([*module.modules(), *values.values()], traced_code)
        self._values_alive = list(values.values())  # guards compare by id, which must not be reused
        is_environment_read = any(value is read for value in self._values_alive for read in (os.environ, os.getenv))
        self._environment = dict(os.environ) if is_environment_read else None
        self._zeros = [
            (compile(name, "<guard>", "eval"), repr(value))
            for name, value in values.items()
            if _has_zero(value) and not _MODULE_ATTRIBUTE.match(name) and name not in taken
        ]
        self._constants = {name: v for name, v in values.items() if type(v) in (int, float) and name not in taken}

    def hold(self) -> bool:
        if torch.is_grad_enabled() is not self._has_gradients:
            with torch.set_grad_enabled(self._has_gradients):
                return self.hold()
        if not self._methods.hold() or self._environment not in (None, os.environ):
            return False
        if not self._manager.check(self._values):
            return False
        if self.drawn is not None:
            self.drawn.draw_again()
        if self.inputs is not None and not self.inputs.read(self._scope):
            return False
        return not self._zeros or all(repr(eval(code, self._scope)) == text for code, text in self._zeros)

    @property
    def draws(self) -> Sequence[Any]:
        return self.drawn.calls if self.drawn is not None else ()

    def begin_step(self) -> Callable[[], None]:
        if self.drawn is None:
            return lambda: None
        before = Generators()
        self.drawn.after.put_back()
        return before.put_back

    @property
    def numbers(self) -> tuple[int | float, ...]:
        inputs = self.inputs
        return tuple(plain_number(inputs.values[i]) for i in inputs.taken) if inputs is not None else ()

    @property
    def read_numbers(self) -> list[str]:
        """Expressions of inputs that are read from objects, not drawn at random."""
        return [name for name in self.inputs.sources if not is_drawn(name)] if self.inputs is not None else []

    def number_inputs(self) -> tuple[NumberInput, ...]:
        inputs = self.inputs
        if inputs is None:
            return ()
        numbers = []
        for index in inputs.taken:
            number = inputs.numbers[index]
            words = "_and_".join(map(self.words_for, number.sources))
            is_read = number.function is None
            name, text = (words, "") if is_read else (f"from_{words}", inputs.text(index, self.words_for))
            numbers.append(NumberInput(name, text, number.kind, inputs.text(index)))
        return tuple(numbers)

    def changed_numbers(self) -> list[str]:
        changed = []
        for name, value in self._constants.items():
            now = next(iter(_evaluated(name, self._scope)), None)
            if is_ordinary(now) and (type(now) is not type(value) or repr(now) != repr(value)):
                changed.append(name)
        return changed

    def words_for(self, name: str) -> str:
        return source_words(name, self._scope).name

    def broken(self) -> str:
        if not self._methods.hold():
            return self._methods.broken()
        if self._environment not in (None, os.environ):
            return "os.environ"
        with torch.set_grad_enabled(self._has_gradients):
            parts = self._manager.check_verbose(self._values).verbose_code_parts
        if not parts and self.inputs is not None and not self.inputs.read(self._scope):
            words = ", ".join(map(self.words_for, self.inputs.sources))
            ways = "; each way that random numbers lead through forward is a program of its own" if self.drawn else ""
            return f"a branch on {words}{ways}"
        return in_users_words(parts[0], self._scope) if parts else "the sign of a zero"


def scope_of_guards(module: nn.Module) -> dict[str, Any]:
    """The names that guard expressions use: locals ``L``, globals ``G``, and Dynamo's functions."""
    from torch._dynamo.guards import _get_closure_vars

    return {**_get_closure_vars(), "L": {"self": module}, "G": traced_globals(module)}


def _evaluated(name: str, scope: dict[str, Any]) -> list[Any]:
    with contextlib.suppress(Exception):  # the expression runs the user's code
        return [eval(name, scope)]
    return []


def _has_zero(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_has_zero(item) for item in value)
    return isinstance(value, float) and value == 0.0


def traced_globals(module: nn.Module) -> dict[str, Any]:
    from torch._dynamo.convert_frame import get_traced_fn

    names: dict[str, Any] = get_traced_fn(module)[0].__globals__
    return names


@contextlib.contextmanager
def captured_output() -> Iterator[list[Any]]:
    from torch._dynamo import functional_export

    capture: Callable[..., Any] = functional_export.fullgraph_capture
    outputs: list[Any] = []

    def keeping(*args: Any, **kwargs: Any) -> Any:
        outputs.append(capture(*args, **kwargs))
        return outputs[-1]

    with patch.object(functional_export, "fullgraph_capture", keeping):
        yield outputs


def guarded_results() -> contextlib.AbstractContextManager[Any]:
    """Makes Dynamo guard Python values that forward only returns, such as a string argument.

    Dynamo's code reads such values in each call, but mirrorc saves them.
    """
    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.variables.lazy import LazyVariableTracker

    generate = PyCodegen.__call__

    def guarding(self: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, LazyVariableTracker) and not value.is_realized():
            value.realize()
        generate(self, value, *args, **kwargs)

    return patch.object(PyCodegen, "__call__", guarding)


_DESCRIPTORS = (
    *(MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType),
    *(GetSetDescriptorType, MemberDescriptorType),
)


def guarded_descriptors() -> contextlib.AbstractContextManager[Any]:
    """Makes Dynamo guard methods and properties of C classes, such as an attribute that is `torch.Tensor.add`."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.builder import VariableBuilder, install_guard

    wrap, thread = VariableBuilder._wrap, threading.get_ident()

    def wrap_guarded(self: Any, value: Any) -> Any:
        if type(value) in _DESCRIPTORS and threading.get_ident() == thread:
            install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
        return wrap(self, value)

    return patch.object(VariableBuilder, "_wrap", wrap_guarded)


def build_guards(
    output: Any, module: nn.Module, inputs: HostNumbers | None = None, drawn: DrawnNumbers | None = None
) -> DynamoGuards:
    """Raises `GuardsChange` if a guard fails at once, because the value changes with each read."""
    from torch._dynamo import config
    from torch._dynamo.convert_frame import get_traced_fn
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    captured = output.graph_capture_output
    guards = captured.output_graph.guards
    needed = [guard for guard in guards if _is_needed(guard.name, guard.create_fn_name())]
    scope = scope_of_guards(module)
    variables = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    (guards if hasattr(guards, "clear") else guards.inner).clear()  # the second in torch 2.11
    for guard in needed:
        if guard.create_fn_name() != "TENSOR_MATCH":
            guards.add(guard, collect_debug_stack=False)
            continue
        # the graph holds this very tensor, not one of its type
        guards.add(_identity(guard, scope), collect_debug_stack=False)
        if not any(id(tensor) in variables for tensor in _evaluated(guard.name, scope)):
            guards.add(guard, collect_debug_stack=False)
    try:
        with (
            config.patch(skip_nnmodule_hook_guards=False),
            metrics_if_heard(),
            get_metrics_context(),
            dynamo_timed("build_guards"),
            guards_not_timed(),
        ):
            manager = captured.build_guards(get_traced_fn(module)[0].__code__).guard_manager
    except AssertionError as error:
        raise GuardsChange(in_users_words(str(error).rpartition("reason: ")[2], scope)) from error
    return DynamoGuards(
        manager, module, captured.traced_code, list(dict.fromkeys(guard.name for guard in needed)), inputs, drawn
    )


def _identity(guard: Any, scope: dict[str, Any]) -> Any:
    from torch._dynamo.guards import GuardBuilder

    is_array = guard.name.startswith("___from_numpy(")  # each evaluation makes a new tensor
    source = guard.originating_source.base if is_array else guard.originating_source
    is_number = is_array and any(isinstance(v, np.number) and v == v for v in _evaluated(source.name, scope))
    identity = source.make_guard(GuardBuilder.EQUALS_MATCH if is_number else GuardBuilder.ID_MATCH)
    identity.user_stack = guard.user_stack
    return identity


def _is_needed(name: str, kind: str) -> bool:
    if kind in _LEFT_OUT or (name.startswith("L[") and not name.startswith("L['self']")):
        return False
    if kind == "EMPTY_NN_MODULE_HOOKS_DICT":
        return not _MODULE_ATTRIBUTE.match(name)
    return not (kind == "TENSOR_MATCH" and _VARIABLE.match(name))


class GuardsChange(Exception):
    """Raised if a guarded value changes before the trace ends. The text names the value."""


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


def guards_not_timed() -> contextlib.AbstractContextManager[Any]:
    """Keeps Dynamo from timing new guards, because this flushes the processor's caches (20 ms and more)."""
    from torch._dynamo import guards

    return patch.object(guards, "profile_guard_manager", lambda *_: 0.0)


_ABSENT = object()
_FROM_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE: attributes of other classes cannot be set


class TracedMethods:
    """Checks that traced methods, code of traced functions, and classes in closures are unchanged."""

    def __init__(self, values: Iterable[Any], codes: Sequence[CodeType]) -> None:
        self._traced = set(codes)
        self._entries: dict[tuple[type, str], Any] = {}
        self._functions: dict[int, FunctionType] = {}
        self._cells: list[tuple[CellType, type]] = []
        self._kinds: set[type] = set()
        for value in values:
            self._enter_functions(_functions_in(value))
            for kind in (type(value), value) if isinstance(value, type) else (type(value),):
                self._enter_class(kind)
        methods = [(*key, method) for key, method in self._entries.items()]
        self._plain = [each for each in methods if getattr(each[0], each[1], None) is each[2]]
        self._others = [each for each in methods if getattr(each[0], each[1], None) is not each[2]]
        self._codes = [(function, function.__code__) for function in self._functions.values()]

    def _enter_class(self, kind: type) -> None:
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        having: dict[str, list[type]] = {}
        for base in kind.__mro__:
            if base.__flags__ & _FROM_PYTHON:
                for name, value in list(vars(base).items()):
                    if self._enter_functions(_functions_in(value)):
                        having.setdefault(name, []).append(base)
        for name, bases in having.items():
            for owner in _owners(kind, name, bases):
                self._entries[owner, name] = _looked_up(owner, name)

    def _enter_functions(self, functions: Iterable[FunctionType]) -> bool:
        traced = [function for function in functions if function.__code__ in self._traced]
        for function in traced:
            if id(function) not in self._functions:
                self._functions[id(function)] = function
                for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                    content = _content(cell)
                    if isinstance(content, type) and content.__flags__ & _FROM_PYTHON:
                        if name != "__class__":  # the cell of super() never changes
                            self._cells.append((cell, content))  # Dynamo does not guard it
                        self._enter_class(content)
        return bool(traced)

    def hold(self) -> bool:
        for owner, name, method in self._plain:
            if getattr(owner, name, None) is not method:  # by far the fastest lookup
                return False
        for function, code in self._codes:
            if function.__code__ is not code:
                return False
        if self._cells and any(_content(cell) is not kind for cell, kind in self._cells):
            return False
        return not self._others or all(_looked_up(owner, name) is method for owner, name, method in self._others)

    def broken(self) -> str:
        """Describes the first change; may be empty."""
        for owner, name, method in (*self._plain, *self._others):
            if _looked_up(owner, name) is not method:
                return f"{owner.__name__}.{name} was replaced"
        for function, code in self._codes:
            if function.__code__ is not code:
                return f"the code of {function.__qualname__} was replaced"
        changed = (kind for cell, kind in self._cells if _content(cell) is not kind)
        return next((f"{kind.__qualname__} was replaced" for kind in changed), "")


def _owners(kind: type, name: str, traced_in: Sequence[type]) -> Sequence[type]:
    """The classes in which to watch a method: the class itself, or its MRO if ``super()`` may have been used."""
    first = next(base for base in kind.__mro__ if name in vars(base))
    if [first] == traced_in:
        return [kind]
    return [base for base in kind.__mro__ if base.__flags__ & _FROM_PYTHON]


def _functions_in(value: Any, depth: int = 4) -> Iterator[FunctionType]:
    if depth == 0:
        return
    # the fast path, for an undecorated function
    if type(value) is FunctionType and value.__closure__ is None and not value.__dict__:
        yield value
        return
    if isinstance(value, FunctionType):
        yield value
        around = [getattr(value, "__wrapped__", None), *map(_content, value.__closure__ or ())]
        around = [inner for inner in around if isinstance(inner, FunctionType | functools.partial)]
    elif isinstance(value, staticmethod | classmethod):
        around = [value.__func__]
    elif isinstance(value, property):
        around = [value.fget, value.fset]
    elif isinstance(value, functools.cached_property | functools.partialmethod | functools.partial):
        around = [value.func]
    else:
        around = [_instance_attributes(value).get("__wrapped__")]
    for inner in around:
        yield from _functions_in(inner, depth - 1)


def _instance_attributes(value: Any) -> Mapping[str, Any]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes if isinstance(attributes, Mapping) else {}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _looked_up(kind: type, name: str) -> Any:
    for base in kind.__mro__:
        value = base.__dict__.get(name, _ABSENT)
        if value is not _ABSENT:
            return value
    return _ABSENT
