"""Random generators that replicas share: the user's, Python's and numpy's."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from mirrorc.errors import CaptureError
from mirrorc.messages.problem import problem


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
