"""Has a step finished that has returned with buckets in flight, before its model or an optimizer shows what it is to write."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mirrorc.errors import ExecutionError
from mirrorc.torch_internals import calls_step_hooks


class ReadGuards:
    """Hooks in a model and its optimizers: of ``state_dict`` and ``load_state_dict`` as long as it is there, and of the model's
    forward while buckets are in flight; these are taken off in between, as what is captured depends on hooks of forward.

    Args:
        model: the user's.
        optimizers: the user's.
        finish: a method that finishes the step, if it is to be; its object is not kept.
        is_unfinished: a method that tells whether it is; likewise.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        finish: Callable[[], object],
        is_unfinished: Callable[[], bool],
    ) -> None:
        hook = self._hook = _Finishing(weakref.WeakMethod(finish), weakref.WeakMethod(is_unfinished))
        own = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
        self._modules = list(dict.fromkeys([model, *own]))
        self._of_forward: list[torch.utils.hooks.RemovableHandle] = []
        handles: list[torch.utils.hooks.RemovableHandle] = []
        for module in self._modules:
            handles.append(module.register_state_dict_pre_hook(hook))
            handles.append(module.register_load_state_dict_pre_hook(hook))
        for optimizer in filter(calls_step_hooks, optimizers):
            handles.append(optimizer.register_state_dict_pre_hook(hook))
            handles.append(optimizer.register_load_state_dict_pre_hook(hook))
        self._finalizer = weakref.finalize(self, _remove, handles)

    def put_on(self) -> None:
        """Has calls of the model guarded, and of its modules that have parameters."""
        if not self._of_forward:
            self._of_forward = [module.register_forward_pre_hook(self._hook) for module in self._modules]

    def take_off(self) -> None:
        """Has calls of the model guarded no more; may be repeated."""
        _remove(self._of_forward)

    def close(self) -> None:
        """Takes all hooks off; may be repeated."""
        self.take_off()
        self._finalizer()


class _Finishing:
    """A hook that finishes a step. It stands in the model, so that copies and pickles of the model meet it, too, by when they may
    have copied what is not updated yet: these are refused."""

    def __init__(
        self, finish: weakref.WeakMethod[Callable[[], object]], is_unfinished: weakref.WeakMethod[Callable[[], bool]]
    ) -> None:
        self._finish, self._is_unfinished, self._pid = finish, is_unfinished, os.getpid()

    def __call__(self, *_: Any) -> None:
        finish, is_unfinished = self._finish(), self._is_unfinished()
        if finish is None or is_unfinished is None or not is_unfinished():
            return
        if self._pid != os.getpid():
            raise ExecutionError(
                "this process was forked while buckets of the last step were in flight (overlap_next_step=True), so a part of "
                "its parameters is that before the step: call step.synchronize() before you fork"
            )
        finish()

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[[], Any], tuple[()]]:
        is_unfinished = self._is_unfinished()
        if is_unfinished is not None and is_unfinished():
            raise ExecutionError(
                "the model was copied or saved while buckets of the last step are in flight (overlap_next_step=True), so a part "
                "of its parameters is that before the step: call step.synchronize() first"
            )
        return _idle_hook, ()


def _idle_hook() -> Callable[..., None]:
    """What a copy of a model has in place of a guard."""
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    pass


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
