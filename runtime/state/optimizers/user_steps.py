"""Detects optimizer steps outside of the compiled step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mirrorc.torch_internals import UncountedHook, calls_step_hooks


class InternalSteps:
    def __init__(self) -> None:
        self._running: Sequence[torch.optim.Optimizer] = ()

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(optimizer is running for running in self._running)

    @contextmanager
    def running(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        self._running = optimizers
        try:
            yield
        finally:
            self._running = ()


class UserSteps:
    """Observes the user's steps of these and all other optimizers, by hooks.

    Version counters are not enough, because torch's fused implementations do not increment them. A class that skips
    ``Optimizer.__init__`` runs no hooks, but optimizers inside its ``step`` do.

    Attributes:
        have_written: the parameters were updated since `mark_mirrored`, by these optimizers or others.
        of_others: ids of parameters outside of these optimizers that others have updated since `mark_mirrored`.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], internal_steps: InternalSteps) -> None:
        self.have_written = False
        self._when_idle: list[weakref.WeakMethod[Callable[[], bool]]] = []
        self._optimizers = tuple(optimizers)
        self._had_gradients: set[int] = set()  # ids of optimizers with gradients at the start of their step
        self.of_others: set[int] = set()
        itself = weakref.ref(self)

        def call(method: Callable[[UserSteps, torch.optim.Optimizer], None]) -> UncountedHook:
            def hook(optimizer: torch.optim.Optimizer) -> None:
                watcher = itself()
                if watcher is not None and not internal_steps.has(optimizer):
                    method(watcher, optimizer)

            return UncountedHook(hook)

        self._handles = [register_optimizer_step_post_hook(call(UserSteps._end_of_another))]
        for optimizer in filter(calls_step_hooks, self._optimizers):
            self._handles.append(optimizer.register_step_pre_hook(call(UserSteps._begin)))
            self._handles.append(optimizer.register_step_post_hook(call(UserSteps._end)))
        self._closing = weakref.finalize(self, _remove, self._handles)

    def mark_mirrored(self) -> None:
        self.have_written = False
        self.of_others.clear()

    def stepped(self) -> set[int]:
        return self.of_others | (self._watched_parameters() if self.have_written else set())

    def _watched_parameters(self) -> set[int]:
        return set().union(*map(_ids_of_parameters, self._optimizers))

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        (self._had_gradients.add if _has_gradients(optimizer) else self._had_gradients.discard)(id(optimizer))

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._had_gradients or _has_gradients(optimizer):  # a closure may have made them
            self.have_written = True
        else:
            any(callback() for callback in [method() for method in self._when_idle] if callback is not None)

    def _end_of_another(self, optimizer: torch.optim.Optimizer) -> None:
        """Runs in every thread after a step of any optimizer with hooks."""
        if any(optimizer is parameters for parameters in self._optimizers):
            return
        parameters, stepped = self._watched_parameters(), _ids_of_parameters(optimizer)
        if not parameters.isdisjoint(stepped):
            self.have_written = True
        self.of_others |= stepped - parameters

    def tell_when_idle(self, callback: Callable[[], bool]) -> None:
        """Registers a callback. Each step without gradients runs callbacks until one returns True."""
        self._when_idle = [*(other for other in self._when_idle if other() is not None), weakref.WeakMethod(callback)]

    def forget(self, callback: Callable[[], bool]) -> None:
        self._when_idle = [other for other in self._when_idle if other() not in (None, callback)]

    def go_on_from(self, others: Sequence[UserSteps]) -> None:
        self.of_others |= set().union(*(other.stepped() for other in others)) - self._watched_parameters()

    def go_on_as(self, other: UserSteps) -> None:
        self.have_written, self._when_idle = other.have_written, other._when_idle
        self.go_on_from([other])

    def close(self) -> None:
        self._closing()


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _ids_of_parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
