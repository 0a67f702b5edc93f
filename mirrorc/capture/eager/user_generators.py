"""The user's own random generators, which replicas share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode


class DrawnGenerators(TorchFunctionMode):
    """Notes the torch generators that operators draw from, except torch's own. They can be anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Generator) and id(value) not in self.drawn and not _is_torchs(value):
                self.drawn[id(value)] = (value, value.get_state())
        return func(*args, **kwargs)

    def put_back(self) -> None:
        for generator, state in self.drawn.values():
            generator.set_state(state)


def _is_torchs(generator: torch.Generator) -> bool:
    return generator is torch.default_generator or any(
        generator is default for default in torch.cuda.default_generators
    )


def states_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """Functions that read and set the state of a generator of torch, Python's random or numpy; None for another object."""
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
