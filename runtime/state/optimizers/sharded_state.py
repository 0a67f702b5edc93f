"""Placeholders for sharded optimizer state, so that a shard is not taken for the whole."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch

from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import problem
from mirrorc.runtime.state.optimizers.user_steps import InternalSteps
from mirrorc.torch_internals import UncountedHook, calls_step_hooks

_FIXES = (
    "step.gather_optimizer_state() on all workers before, which makes it whole until the next step",
    "optimizer.load_state_dict(state) or optimizer.state.clear(), once the step is closed",
)
_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.WeakSet[InternalSteps]] = weakref.WeakKeyDictionary()


class DealtState:
    """A placeholder for state sharded over workers. Every use raises an error."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"<{self.dtype}, a part of which lies with each worker: step.gather_optimizer_state() makes it whole>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and torch probe any object for these
            raise AttributeError(name)
        _refuse(f"the optimizer's state is used ({name})")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("the optimizer is copied or saved")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse("the optimizer is copied or saved")


def _refuse(use: str) -> NoReturn:
    raise problem(
        ExecutionError, f"MC6402: {use}, but with shard_optimizer=True each worker has a part of it", "", _FIXES
    )


def has_dealt_state(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        isinstance(value, DealtState)
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
    )


def refuse_dealt_state(optimizer: torch.optim.Optimizer, use: str) -> None:
    if has_dealt_state(optimizer):
        _refuse(use)


def watch_dealt_state(optimizer: torch.optim.Optimizer, internal_steps: InternalSteps) -> None:
    """Makes ``state_dict()`` and ``step()`` of an optimizer raise an error while its state is incomplete.

    A class that skips ``Optimizer.__init__`` has no hooks, but its state is never sharded.
    """
    if optimizer not in _watched and calls_step_hooks(optimizer):
        _watched[optimizer] = weakref.WeakSet()
        optimizer.register_state_dict_pre_hook(_before_state_dict)
        optimizer.register_step_pre_hook(UncountedHook(_before_step))
    if optimizer in _watched:
        _watched[optimizer].add(internal_steps)


def _before_state_dict(optimizer: torch.optim.Optimizer) -> None:
    refuse_dealt_state(optimizer, f"{type(optimizer).__name__}.state_dict() was called")


def _before_step(optimizer: torch.optim.Optimizer) -> None:
    if not any(steps.has(optimizer) for steps in _watched.get(optimizer, ())):  # a copy has the hook, too
        refuse_dealt_state(optimizer, f"{type(optimizer).__name__}.step() was called")
