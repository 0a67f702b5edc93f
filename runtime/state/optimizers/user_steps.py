"""Notices the steps that the user, or a library, makes with optimizers of parameters whose updates a compiled step makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mirrorc.torch_internals import UncountedHook, calls_step_hooks


class OwnSteps:
    """The optimizers whose steps mirrorc itself calls now, over variables that several steps may hold."""

    def __init__(self) -> None:
        self._running: Sequence[torch.optim.Optimizer] = ()

    def has(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer is one of them."""
        return any(optimizer is running for running in self._running)

    @contextmanager
    def running(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """A block in which mirrorc itself calls the steps of these optimizers."""
        self._running = optimizers
        try:
            yield
        finally:
            self._running = ()


class UserSteps:
    """Watches the steps of optimizers, and of others that have their parameters, by hooks that do not keep the watcher alive.

    The version counters of tensors do not tell: torch's fused implementations write parameters and state without counting.
    An optimizer whose class does not call ``Optimizer.__init__`` runs no hooks; those that it calls in its ``step`` do.

    Args:
        optimizers: the user's, whose updates the compiled step makes.
        own_steps: tells the steps that mirrorc makes with them, or with others of the same variables.

    Attributes:
        have_written: whether the user has made a step with gradients since this was last set to False.
        of_others: the ids of other parameters that some optimizer has made a step with; whoever has seen to them clears this.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], own_steps: OwnSteps) -> None:
        self.have_written = False
        self._when_idle: list[weakref.WeakMethod[Callable[[], bool]]] = []
        self._optimizers = tuple(optimizers)
        self._had_gradients: set[int] = set()  # the ids of optimizers whose parameters had some when their step began
        self.of_others: set[int] = set()
        itself = weakref.ref(self)

        def call(method: Callable[[UserSteps, torch.optim.Optimizer], None]) -> UncountedHook:
            def hook(optimizer: torch.optim.Optimizer) -> None:
                watcher = itself()
                if watcher is not None and not own_steps.has(optimizer):
                    method(watcher, optimizer)

            return UncountedHook(hook)

        self._handles = [register_optimizer_step_post_hook(call(UserSteps._end_of_another))]
        for optimizer in filter(calls_step_hooks, self._optimizers):
            self._handles.append(optimizer.register_step_pre_hook(call(UserSteps._begin)))
            self._handles.append(optimizer.register_step_post_hook(call(UserSteps._end)))
        self._closing = weakref.finalize(self, _remove, self._handles)

    def stepped(self) -> set[int]:
        """The ids of the parameters that some optimizer has made a step with, those of the watched ones included."""
        return self.of_others | (self._own_parameters() if self.have_written else set())

    def _own_parameters(self) -> set[int]:
        return set().union(*map(_ids_of_parameters, self._optimizers))

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        (self._had_gradients.add if _has_gradients(optimizer) else self._had_gradients.discard)(id(optimizer))

    def _end(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._had_gradients or _has_gradients(optimizer):  # a closure may have made them
            self.have_written = True
        else:
            any(told() for told in [method() for method in self._when_idle] if told is not None)

    def _end_of_another(self, optimizer: torch.optim.Optimizer) -> None:
        """Called in every thread after every step of any optimizer but those that update whole buckets, which call no hooks."""
        if any(optimizer is own for own in self._optimizers):
            return
        own, stepped = self._own_parameters(), _ids_of_parameters(optimizer)
        if not own.isdisjoint(stepped):
            self.have_written = True
        self.of_others |= stepped - own

    def tell_when_idle(self, told: Callable[[], bool]) -> None:
        """Has a method called after a step of one of these optimizers for which no parameter had a gradient, as long as the
        method's object is there, and unless one that came before returns True.
        """
        self._when_idle = [*(other for other in self._when_idle if other() is not None), weakref.WeakMethod(told)]

    def forget(self, told: Callable[[], bool]) -> None:
        """Takes back what is called when idle, if it is there."""
        self._when_idle = [other for other in self._when_idle if other() not in (None, told)]

    def go_on_from(self, others: Sequence[UserSteps]) -> None:
        """Takes over which parameters others have seen steps of that came before this one."""
        self.of_others |= set().union(*(other.stepped() for other in others)) - self._own_parameters()

    def go_on_as(self, other: UserSteps) -> None:
        """Takes the place of a watcher of the same optimizers."""
        self.have_written, self._when_idle = other.have_written, other._when_idle
        self.go_on_from([other])

    def close(self) -> None:
        """Removes the hooks."""
        self._closing()


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _ids_of_parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
