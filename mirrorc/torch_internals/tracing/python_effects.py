"""Side effects of a traced forward, which are not in its graph."""

from __future__ import annotations

import builtins
import contextlib
import logging
import re
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import nn

from mirrorc.torch_internals.tracing.source_names import SourceWords, source_words
from mirrorc.torch_internals.tracing.tracked_values import (
    MISSING,
    ChangedContainer,
    MadeContainer,
    attribute_of,
    changed_containers,
    changed_items,
    content_of,
    evaluated,
    is_same,
    items_of,
    made_container,
    replace_items,
    source_name,
    stand_in,
)

_METHODS = ("debug", "info", "warning", "error", "exception", "critical", "log")
_WARNED: dict[Any, Any] = {}  # Python's filters show a warning of a line once


@dataclass(frozen=True)
class PythonWrite:
    """Forward's changes to an object that existed before the trace.

    Attributes:
        source: the expression that reads the object, from ``L['self']`` or globals ``G``.
        parts: suffixes of ``source`` for the changed parts: ``.name``, ``['key']``, or ``[`` for a list or set.
        values: the known values of assigned attributes, by name; new tensors are stand-ins.
        items: a container's new items, as `items_of` returns them; `MISSING` if unchanged or unknown.
        is_constant: all changes assign constants to attributes.
        words: the changed part in the user's words; the whole object if several parts have changed.
    """

    source: str
    parts: tuple[str, ...]
    stack: Sequence[traceback.FrameSummary]
    words: SourceWords
    owner: Any = None
    values: Mapping[str, Any] = field(default_factory=dict)
    items: Any = MISSING
    is_constant: bool = False

    @property
    def is_read_by_changing(self) -> bool:
        """True for a generator or an iterator: a read changes it."""
        is_collection = isinstance(self.owner, list | dict | set | deque)
        return self.parts == ("[",) and not is_collection and self.owner is not MISSING

    @property
    def can_be_applied(self) -> bool:
        attributes = {part[1:] for part in self.parts if part.startswith(".")}
        if attributes != set(self.values) or (attributes and not hasattr(self.owner, "__dict__")):
            return False
        return self.items is not MISSING or len(attributes) == len(self.parts)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        before = dict(self.owner.__dict__) if self.values else {}
        held: Any = None
        if self.items is not MISSING:
            held = dict(self.owner.items()) if isinstance(self.owner, dict) else list(self.owner)
        try:
            if self.values:
                _set_attributes(self.owner, {**before, **self.values}, self.values)
            if held is not None:
                replace_items(self.owner, self.items)
            yield
        finally:
            if self.values:
                _set_attributes(self.owner, before, self.values)
            if held is not None:
                replace_items(self.owner, held)


def _set_attributes(owner: Any, wanted: Mapping[str, Any], changing: Iterable[str]) -> None:
    if not isinstance(owner, type):
        owner.__dict__.clear()
        owner.__dict__.update(wanted)
        return
    for key in changing:
        if key in wanted:
            type.__setattr__(owner, key, wanted[key])
        elif key in owner.__dict__:
            type.__delattr__(owner, key)


@dataclass(frozen=True)
class PythonCall:
    """A call of ``print``, a warning or a log.

    Attributes:
        has_run: the call ran in the trace; False if an argument is unknown.
        repeats: plain PyTorch would repeat the call in each step.
    """

    name: str
    stack: Sequence[traceback.FrameSummary]
    has_run: bool
    repeats: bool


@dataclass
class PythonEffects:
    """Side effects of one trace. Stacks begin with their outermost frame.

    Attributes:
        draws: stacks of random draws that steps would not repeat.
        cached_draws: stacks of calls of functions that cache random numbers.
        changed_arguments: changed containers of arguments, which the trace itself has built.
    """

    writes: list[PythonWrite] = field(default_factory=list)
    calls: list[PythonCall] = field(default_factory=list)
    draws: list[Sequence[traceback.FrameSummary]] = field(default_factory=list)
    cached_draws: list[Sequence[traceback.FrameSummary]] = field(default_factory=list)
    changed_arguments: list[ChangedContainer] = field(default_factory=list)


def reported_functions() -> set[Callable[..., Any]]:
    return {builtins.print, warnings.warn, *(getattr(logging, name) for name in _METHODS)}


@contextlib.contextmanager
def observed_effects(
    module: nn.Module, names: Mapping[str, Any], makes_arguments: Callable[..., Any] | None = None
) -> Iterator[PythonEffects]:
    """Observes the trace of a module's call in this thread.

    Args:
        makes_arguments: the function that builds the containers of the arguments, if changes of these count.
    """
    effects, scope = PythonEffects(), {"L": {"self": module}, "G": names}
    with contextlib.ExitStack() as stack:
        for owner, name, function in (*_write_observers(effects, scope, makes_arguments), *_call_observers(effects)):
            stack.enter_context(patch.object(owner, name, function))
        yield effects


def _write_observers(
    effects: PythonEffects, scope: Mapping[str, Any], makes_arguments: Callable[..., Any] | None
) -> list[tuple[Any, str, Any]]:
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables.functions import UserFunctionVariable

    thread, made = threading.get_ident(), list[MadeContainer]()
    clear, prune = SideEffects.clear, SideEffects.prune_dead_object_new
    enter = UserFunctionVariable.call_function

    def observed_clear(self: Any) -> None:
        if threading.get_ident() == thread:
            effects.writes = _writes(self, scope)  # the last attempt wins
        clear(self)

    def observed_prune(self: Any, tx: Any) -> None:
        if threading.get_ident() == thread:
            effects.changed_arguments = changed_containers(made, self)
        prune(self, tx)  # it forgets the attributes of new objects

    def observed_enter(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        is_logger = threading.get_ident() == thread and self.fn is logging.getLogger
        result = (_logger([*args, *kwargs.values()]) if is_logger else None) or enter(self, tx, args, kwargs)
        if threading.get_ident() == thread and makes_arguments is not None and self.fn is makes_arguments:
            made.append(made_container(tx.output, result))
        return result

    return [
        (SideEffects, "clear", observed_clear),
        (SideEffects, "prune_dead_object_new", observed_prune),
        (UserFunctionVariable, "call_function", observed_enter),
    ]


def _call_observers(effects: PythonEffects) -> list[tuple[Any, str, Any]]:
    from torch._dynamo.variables.misc import IgnoredFunctionVariable, LoggingLoggerVariable

    thread = threading.get_ident()
    call, log = IgnoredFunctionVariable.call_function, LoggingLoggerVariable.call_method

    def observed_call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() == thread and self.value in reported_functions():
            is_warning = self.value is warnings.warn  # Python shows a warning of a line once
            name = "" if self.value is builtins.print else f"{self.value.__module__}."
            name += self.value.__name__
            effects.calls.append(_run(name, _warn if is_warning else self.value, args, kwargs, not is_warning))
        return call(self, tx, args, kwargs)

    def observed_log(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() == thread and (name in _METHODS or name == "warning_once"):
            repeats = name in _METHODS and name != "log" and self.value.isEnabledFor(_level(name))
            effects.calls.append(_run(f"logger.{name}", getattr(self.value, name), args, kwargs, repeats))
        return log(self, tx, name, args, kwargs)

    return [
        (IgnoredFunctionVariable, "call_function", observed_call),
        (LoggingLoggerVariable, "call_method", observed_log),
    ]


def _logger(args: Sequence[Any]) -> Any:
    from torch._dynamo.variables.misc import LoggingLoggerVariable

    if not all(arg.is_python_constant() for arg in args):
        return None
    return LoggingLoggerVariable(logging.getLogger(*(arg.as_python_constant() for arg in args)))


def _warn(message: Any, category: Any = None, *_: Any, **__: Any) -> None:
    from torch._guards import TracingContext

    frame = TracingContext.extract_stack()[-1]
    kind = type(message) if isinstance(message, Warning) else category or UserWarning
    warnings.warn_explicit(message, kind, frame.filename, frame.lineno or 0, registry=_WARNED)


def _level(name: str) -> int:
    return int(getattr(logging, "ERROR" if name == "exception" else name.upper()))


def _run(name: str, function: Callable[..., Any], args: Any, kwargs: Any, repeats: bool) -> PythonCall:
    from torch._guards import TracingContext

    stack, has_run = list(TracingContext.extract_stack()), False
    with contextlib.suppress(Exception):  # the tracer may not know the arguments
        values, named = [_value_of(arg) for arg in args], {key: _value_of(arg) for key, arg in kwargs.items()}
        function(*values, **named)
        has_run = True
    return PythonCall(name, stack, has_run, repeats)


def _value_of(variable: Any) -> Any:
    if hasattr(variable, "realize"):
        variable = variable.realize()
    if hasattr(variable, "format_string"):
        named = {key: _value_of(value) for key, value in variable.sym_kwargs.items()}
        return variable.format_string.format(*map(_value_of, variable.sym_args), **named)
    if variable.is_python_constant():
        return variable.as_python_constant()
    return variable.as_proxy().node.meta["example_value"]


def _writes(effects: Any, scope: Mapping[str, Any]) -> list[PythonWrite]:
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    writes = []
    for variable in effects._get_modified_vars():
        if not isinstance(variable.mutation_type, AttributeMutationExisting | ValueMutationExisting):
            continue
        name = re.sub(r"\.__dict__\['(_buffers|_parameters)'\]$", r".\1", source_name(variable))
        stored = effects.store_attr_mutations.get(variable, {})
        real = evaluated(name, scope)
        parts = [f".{key}" for key, value in stored.items() if not is_same(value, attribute_of(real, key), scope)]
        content = content_of(variable)
        if not stored or isinstance(real, dict):
            parts += changed_items(content, real, scope)
        recorded = getattr(effects, "mutation_user_stacks", {})
        stacks = recorded.get(variable) or recorded.get(content) or [[]]
        if parts:
            changed = {key: value for key, value in stored.items() if f".{key}" in parts}
            values = {key: stand_in(value, scope) for key, value in changed.items()}
            known = {key: value for key, value in values.items() if value is not MISSING}
            items = items_of(content, real, scope) if len(changed) < len(parts) else MISSING
            is_constant = len(changed) == len(parts) and all(value.is_python_constant() for value in changed.values())
            part = parts[0] if len(parts) == 1 and parts[0] != "[" else ""
            words = source_words(name + part, scope)
            writes.append(PythonWrite(name, tuple(parts), list(stacks[-1]), words, real, known, items, is_constant))
    return writes
