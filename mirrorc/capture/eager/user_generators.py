"""The user's own random generators, which replicas share."""

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
    """Detects and undoes draws from the user's generators.

    Torch's generators are found everywhere; generators of Python's random and numpy only as attributes of modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._generators = [
            (f"{key!r}, a {type(value).__module__}.{type(value).__name__}", states)
            for module in modules
            for key, value in vars(module).items()
            if (states := _states_of(value)) is not None
        ]
        self._before = [read() for _, (read, _) in self._generators]
        self._torchs = _Drawing()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with self._torchs:
            yield

    def drawn(self) -> str | None:
        if self._torchs.drawn:
            return "a torch.Generator of its own"
        changed = (
            name
            for (name, (read, _)), before in zip(self._generators, self._before, strict=True)
            if not _are_equal(read(), before)
        )
        return next(changed, None)

    def put_back(self) -> None:
        for (_, (_, write)), before in zip(self._generators, self._before, strict=True):
            write(before)
        for generator, state in self._torchs.drawn.values():
            generator.set_state(state)


class _Drawing(TorchFunctionMode):
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
    return generator is torch.default_generator or any(
        generator is default for default in torch.cuda.default_generators
    )


def _states_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return lambda: value.get_state(legacy=False), value.set_state
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


def _are_equal(state: Any, other: Any) -> bool:
    if isinstance(state, dict):
        return state.keys() == other.keys() and all(_are_equal(state[key], other[key]) for key in state)
    if isinstance(state, np.ndarray):
        return np.array_equal(state, other)
    return bool(state == other)
