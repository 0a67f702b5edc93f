"""Refuses draws of a run from random generators that replicas share."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from mirrorc.capture.eager.user_generators import DrawnGenerators
from mirrorc.errors import CaptureError
from mirrorc.messages.problem import problem


@contextlib.contextmanager
def refused_draws(model_name: str) -> Iterator[None]:
    before = random.getstate(), np.random.get_state(legacy=False)
    random.seed()  # a state that a seed in forward does not reproduce
    np.random.seed()
    python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    torchs = DrawnGenerators()
    try:
        with torchs:
            yield
        if random.getstate() != python or not _is_same_state(np.random.get_state(legacy=False), of_numpy):
            raise problem(
                CaptureError,
                f"MC2303: forward or loss of {model_name} draws from Python's random or numpy's",
                "all replicas share it, and each would draw other numbers in every run",
                ("torch.rand(()).item()", "draw before the step, and pass what was drawn as an argument"),
            )
        if torchs.drawn:
            raise problem(
                CaptureError,
                f"MC2303: forward or loss of {model_name} draws from a torch.Generator of its own",
                "all replicas share it, and which number each gets would follow their threads",
                (
                    "draw from torch's default generator, torch.rand(4), of which each replica has a stream of its own",
                    "draw before the step, and pass what was drawn as an argument",
                ),
            )
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torchs.put_back()


def _is_same_state(state: Any, other: Any) -> bool:
    state, other = state["state"], other["state"]
    return bool(state["pos"] == other["pos"] and np.array_equal(state["key"], other["key"]))
