"""Notices the steps that the user, or a library, makes with an optimizer whose updates a compiled step makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mirrorc.torch_internals import UncountedHook


class UserSteps:
    """Watches the steps of an optimizer, by hooks that do not keep the watcher alive.

    The version counters of tensors do not tell: torch's fused implementations write parameters and state without counting.

    Args:
        optimizer: the user's.

    Attributes:
        have_written: whether the user has made a step with gradients since this was last set to False.
        when_idle: called after a step of the user's for which no parameter had a gradient.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.have_written = False
        self.when_idle: Callable[[], None] = lambda: None
        self._had_gradients = False
        self._are_ours = False
        itself = weakref.ref(self)

        def call(method: Callable[[UserSteps, torch.optim.Optimizer], None]) -> UncountedHook:
            def hook(optimizer: torch.optim.Optimizer) -> None:
                watcher = itself()
                if watcher is not None and not watcher._are_ours:
                    method(watcher, optimizer)

            return UncountedHook(hook)

        self._handles = (
            optimizer.register_step_pre_hook(call(UserSteps._begin)),
            optimizer.register_step_post_hook(call(UserSteps._end)),
        )

    @contextmanager
    def are_ours(self) -> Iterator[None]:
        """A block in which mirrorc itself calls the optimizer's step."""
        self._are_ours = True
        try:
            yield
        finally:
            self._are_ours = False

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._had_gradients = _has_gradients(optimizer)

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        if self._had_gradients or _has_gradients(optimizer):  # a closure may have made them
            self.have_written = True
        else:
            self.when_idle()

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
