"""Random numbers of Python and numpy: as graph inputs, drawn before each step, or found in a trace."""

from __future__ import annotations

import contextlib
import random
import threading
import traceback
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from mirrorc.torch_internals.numbers.number_trace import NumberTrace, is_ordinary


def torch_random() -> float:
    return torch.rand(()).item()


_DRAWS: dict[Callable[..., Any], int] = {  # most positional arguments for a single number
    **dict.fromkeys((random.random, np.random.random, np.random.random_sample, torch_random), 0),
    **dict.fromkeys((np.random.rand, np.random.randn), 0),
    **dict.fromkeys((random.uniform, random.randint, np.random.uniform, np.random.normal, np.random.randint), 2),
    random.randrange: 3,
}
_KEYWORDS = frozenset(("a", "b", "low", "high", "loc", "scale", "start", "stop", "step"))
_BEGINNING = "L['self'].drawn["


def is_drawn(name: str) -> bool:
    return name.startswith(_BEGINNING)


class Generators:
    def __init__(self) -> None:
        self._python, self._numpy, self._torch = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def put_back(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)


class DrawnNumbers:
    """The random numbers of a trace, in order. Guards and graphs read them from the module's list ``drawn``."""

    def __init__(self, module: nn.Module) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._numbers: list[Any] = module.drawn  # type: ignore[assignment]
        self._stacks: list[Sequence[traceback.FrameSummary]] = []
        self._attempt: Any = None
        self.before = self.after = Generators()

    def draw(
        self, attempt: object, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, Any]:
        """Returns the index and value of a new number. Each attempt of the tracer draws the same numbers."""
        from torch._guards import TracingContext

        if attempt is not self._attempt:
            self._attempt, self.calls, self._stacks = attempt, [], []
            self._numbers.clear()
            self.before.put_back()
        self.calls.append((function, args, kwargs))
        self._stacks.append(list(TracingContext.extract_stack()))
        self._numbers.append(function(*args, **kwargs))
        return len(self.calls) - 1, self._numbers[-1]

    def draw_again(self) -> None:
        """Draws the numbers of the next step; restores the generators."""
        before = Generators()
        self._numbers[:] = [function(*args, **kwargs) for function, args, kwargs in self.calls]
        self.after = Generators()
        before.put_back()

    def stack_of(self, names: Collection[str]) -> Sequence[traceback.FrameSummary]:
        """The frames of the first draw among the named numbers, outermost first; may be empty."""
        places = [int(name[len(_BEGINNING) : -1]) for name in names if is_drawn(name)]
        return self._stacks[min(places)] if places else ()


@contextlib.contextmanager
def taken_draws(module: nn.Module, trace: NumberTrace) -> Iterator[DrawnNumbers]:
    """Makes single draws in Dynamo's traces of this thread graph inputs; restores the generators."""
    from torch._dynamo.source import AttrSource, GetItemSource, LocalSource
    from torch._dynamo.variables import misc, user_defined
    from torch._dynamo.variables.functions import SkipFunctionVariable, UserFunctionVariable

    drawn, draw = DrawnNumbers(module), user_defined.call_random_fn

    def taken(tx: Any, function: Any, args: Any, kwargs: Any) -> Any:
        if not trace.is_here or not _is_single_draw(function, args, kwargs):
            return None
        constants = tuple(arg.as_python_constant() for arg in args)
        named = {key: arg.as_python_constant() for key, arg in kwargs.items()}
        index, value = drawn.draw(tx.output.shape_env, function, constants, named)
        source = GetItemSource(AttrSource(LocalSource("self"), "drawn"), index)
        return trace.take(tx, source, value) if is_ordinary(value) else None

    def method(tx: Any, function: Any, args: Any, kwargs: Any) -> Any:
        return taken(tx, function, args, kwargs) or draw(tx, function, args, kwargs)

    def calls_of(variable: Any, attribute: str) -> Any:
        call = variable.call_function

        def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            return taken(tx, getattr(self, attribute), args, kwargs) or call(self, tx, args, kwargs)

        return patch.object(variable, "call_function", called)

    try:
        with (
            calls_of(UserFunctionVariable, "fn"),
            calls_of(SkipFunctionVariable, "value"),
            calls_of(misc.NumpyVariable, "value"),
            patch.object(misc, "call_random_fn", method),
            patch.object(user_defined, "call_random_fn", method),
        ):
            yield drawn
    finally:
        if drawn.calls:
            drawn.before.put_back()


def _is_single_draw(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    most = _DRAWS.get(function) if isinstance(function, Hashable) else None  # type: ignore[call-overload]
    if most is None or len(args) > most or not _KEYWORDS.issuperset(kwargs):
        return False
    return all(arg.is_python_constant() for arg in (*args, *kwargs.values()))


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
