"""Generators of random numbers that a user has made, and that replicas would share."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class HeldGenerators:
    """Tells whether a block has drawn from generators of the user's own, and undoes that.

    Those of Python's random and of numpy are seen if they are attributes of modules, those of torch wherever they are.

    Args:
        modules: those of model and loss.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._found = [
            (f"{key!r}, a {type(value).__module__}.{type(value).__name__}", states)
            for module in modules
            for key, value in vars(module).items()
            if (states := _states_of(value)) is not None
        ]
        self._before = [read() for _, (read, _) in self._found]
        self._torchs = _Drawing()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """The block."""
        with self._torchs:
            yield

    def drawn(self) -> str | None:
        """A description of a generator from which the block has drawn; None if there is none."""
        if self._torchs.drawn:
            return "a torch.Generator of its own"
        changed = (
            name
            for (name, (read, _)), before in zip(self._found, self._before, strict=True)
            if not _are_equal(read(), before)
        )
        return next(changed, None)

    def put_back(self) -> None:
        """Gives all generators the states that they had before."""
        for (_, (_, write)), before in zip(self._found, self._before, strict=True):
            write(before)
        for generator, state in self._torchs.drawn.values():
            generator.set_state(state)


class _Drawing(TorchFunctionMode):
    """Notes which generators torch's functions are given, with the states before."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and id(value) not in self.drawn and not _is_torchs(value):
                self.drawn[id(value)] = (value, value.get_state())
        return func(*args, **kwargs)


def _is_torchs(generator: torch.Generator) -> bool:
    """Whether this is a default generator, of which each replica has a stream."""
    return generator is torch.default_generator or any(generator is one for one in torch.cuda.default_generators)


def _states_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """What reads and what writes the state of a generator; None if a value is none."""
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return lambda: value.get_state(legacy=False), value.set_state
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two states are equal, which hold dicts and arrays."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)
