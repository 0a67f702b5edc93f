"""Refuses effects of a run on objects that replicas share."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from mirrorc.capture.call.training_call import TrainingCall
from mirrorc.capture.eager.user_generators import HeldGenerators
from mirrorc.errors import CaptureError
from mirrorc.messages.problem import problem
from mirrorc.user.restore import CONTAINERS, can_keep_value, content_of, is_same


@contextlib.contextmanager
def refused_effects(call: TrainingCall, model_name: str) -> Iterator[None]:
    before = random.getstate(), np.random.get_state(legacy=False)
    random.seed()  # a state that a seed in forward does not reproduce
    np.random.seed()
    python, of_numpy = random.getstate(), np.random.get_state(legacy=False)
    contents = [
        (key, value, content_of(value))
        for module in call.modules()
        for key, value in vars(module).items()
        if type(value) in CONTAINERS
    ]
    generators = HeldGenerators(call.modules())
    kinds = _kinds_of(nn.Module)
    modules = [value for value in gc.get_objects() if type(value) in kinds]  # there may be millions of objects
    buffers = {id(buffer): buffer for module in modules for buffer in _buffers_of(module)}
    snapshots = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    try:
        with generators.watched():
            yield
        if random.getstate() != python or not _is_same_state(np.random.get_state(legacy=False), of_numpy):
            raise problem(
                CaptureError,
                f"MC2303: forward or loss of {model_name} draws from Python's random or numpy's",
                "all replicas share it, and each would draw other numbers in every run",
                ("torch.rand(()).item()", "draw before the step, and pass what was drawn as an argument"),
            )
        changed = next((key for key, value, content in contents if not is_same(value, content)), None)
        # a normalization does not count its writes as versions
        writes = not all(have_same_bits(*pair) for pair in snapshots)
        _refuse(generators.drawn(), changed, writes, model_name)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        generators.put_back()
        for buffer, value in snapshots:
            if not have_same_bits(buffer, value):
                buffer.detach().copy_(value)


def _refuse(drawn: str | None, changed: str | None, writes: bool, model_name: str) -> None:
    if drawn is not None:
        raise problem(
            CaptureError,
            f"MC2303: forward or loss of {model_name} draws from {drawn}",
            "all replicas share it, and which number each gets would follow their threads",
            (
                "draw from torch's default generator, torch.rand(4), of which each replica has a stream of its own",
                "draw before the step, and pass what was drawn as an argument",
            ),
        )
    if changed is not None:
        raise problem(
            CaptureError,
            f"MC2302: forward or loss of {model_name} changes {changed!r}, a collection that all replicas share",
            "its order would follow their threads",
            ("collect it with the plain model between steps", "keep it in a buffer, self.x.copy_(value)"),
        )
    if writes:
        raise problem(
            CaptureError,
            f"MC2304: forward or loss of {model_name} writes a buffer of a module that neither holds as a submodule",
            "all replicas would write the same memory",
            ("make the module a submodule", "put it into eval mode"),
        )


def _kinds_of(kind: type) -> set[type]:
    kinds, waiting = {kind}, [kind]
    while waiting:
        derived: list[type] = type.__subclasses__(waiting.pop())
        new = [subclass for subclass in derived if subclass not in kinds]
        kinds.update(new)
        waiting += new
    return kinds


def _is_same_state(state: Any, other: Any) -> bool:
    state, other = state["state"], other["state"]
    return bool(state["pos"] == other["pos"] and np.array_equal(state["key"], other["key"]))


def _buffers_of(module: Any) -> list[torch.Tensor]:
    """Empty for a released copy, whose attributes are cleared."""
    table = vars(module).get("_buffers") or {}
    return [buffer for buffer in table.values() if isinstance(buffer, torch.Tensor) and can_keep_value(buffer)]


def have_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    bits = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return torch.equal(*bits)
