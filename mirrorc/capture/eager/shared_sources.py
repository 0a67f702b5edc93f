"""Iterators, files, queues and random generators that replicas share, from which each would take other items."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import queue
import random
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from types import BuiltinMethodType, MethodType, MethodWrapperType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from mirrorc.capture.diagnostics.python_effects import users_place
from mirrorc.errors import CaptureError
from mirrorc.messages.problem import problem

_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "mirrorc"} - {"collections", "__main__"}
_METHODS = (MethodType, BuiltinMethodType, MethodWrapperType)
_QUEUES = (queue.Queue, queue.SimpleQueue)


def is_users_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _LIBRARIES


class Source(NamedTuple):
    """The location of an iterator, file or queue, maybe within a tuple or a partial function."""

    name: str
    value: Any
    read: Callable[[], Any]
    write: Callable[[Any], object]


class Refusing:
    """A substitute for an iterator, file or queue, or a method of one. Other threads still use the original."""

    def __init__(self, name: str, model_name: str, threads: Collection[int], original: Any) -> None:
        self.__dict__.update(original=original, _name=name, _model_name=model_name, _threads=threads)

    def _in_other_threads(self) -> Any:
        if threading.get_ident() in self._threads:
            raise problem(
                CaptureError,
                f"MC2303: forward or loss of {self._model_name} uses {self._name}, a {type(self.original).__name__}",
                "replicas would share it, each would take other items, and a call that fails could not put them back",
                "item = next(items) in your loop, and pass it as an argument",
                at=users_place(traceback.extract_stack()),
            )
        return self.original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._in_other_threads(), name)

    def __iter__(self) -> Any:
        return iter(self._in_other_threads())

    def __next__(self) -> Any:
        return next(self._in_other_threads())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._in_other_threads()(*args, **kwargs)


def _is_source(value: Any) -> bool:
    kind = type(value)
    is_source = hasattr(kind, "__next__") or issubclass(kind, (*_QUEUES, io.IOBase))
    return is_source and not is_users_class(kind)


def stand_in_for(value: Any, refusing: Callable[[Any], Refusing]) -> Any:
    kind = type(value)
    if _is_source(value) or (kind in _METHODS and _is_source(value.__self__)):
        return refusing(value)
    if kind is tuple:
        items = tuple(stand_in_for(item, refusing) for item in value)
        return value if all(map(operator.is_, items, value)) else items
    if kind is functools.partial:
        parts = [value.func, *value.args, *value.keywords.values()]
        function, *others = stand_ins = [stand_in_for(part, refusing) for part in parts]
        if all(map(operator.is_, stand_ins, parts)):
            return value
        args, named = others[: len(value.args)], others[len(value.args) :]
        return functools.partial(function, *args, **dict(zip(value.keywords, named, strict=True)))
    return value


@contextlib.contextmanager
def refused_draws(model_name: str) -> Iterator[None]:
    """Refuses a block's draws from generators that replicas share, and restores the generators."""
    before = random.getstate(), np.random.get_state(legacy=False)
    random.seed()  # a state that a seed in forward does not reproduce
    np.random.seed()
    python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    torchs = _DrawnGenerators()
    try:
        with torchs:
            yield
        if random.getstate() != python or not _is_same_state(np.random.get_state(legacy=False), of_numpy):
            raise problem(
                CaptureError,
                f"MC2303: forward or loss of {model_name} draws from Python's random or numpy's",
                "all replicas share it, and each would draw other numbers in every run",
                ("torch.rand(()).item()", "draw in your loop, and pass what was drawn as an argument"),
            )
        if torchs.drawn:
            raise problem(
                CaptureError,
                f"MC2303: forward or loss of {model_name} draws from a torch.Generator of its own",
                "all replicas share it, and which number each gets would follow their threads",
                (
                    "draw from torch's default generator, torch.rand(4), of which each replica has a stream of its own",
                    "draw in your loop, and pass what was drawn as an argument",
                ),
            )
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torchs.put_back()


def _is_same_state(state: Any, other: Any) -> bool:
    state, other = state["state"], other["state"]
    return bool(state["pos"] == other["pos"] and np.array_equal(state["key"], other["key"]))


class _DrawnGenerators(TorchFunctionMode):
    """Collects the torch generators that operators draw from, except torch's own; they can be anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, torchs = kwargs or {}, (torch.default_generator, *torch.cuda.default_generators)
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and id(value) not in self.drawn and value not in torchs:
                self.drawn[id(value)] = (value, value.get_state())
        return func(*args, **kwargs)

    def put_back(self) -> None:
        for generator, state in self.drawn.values():
            generator.set_state(state)


def states_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Functions that get and set the state of a generator of torch, Python's random or numpy; None for other objects."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return lambda: value.get_state(legacy=False), value.set_state
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None
