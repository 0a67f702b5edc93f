"""The user's optimizers: their steps, writes to their state, and placeholders for sharded state."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import UncountedHook, calls_step_hooks, copy_each


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


class ShownNumbers:
    """Scalars of buckets, repeated for every parameter of a bucket.

    A write to a scalar may leave its version unchanged, so the values are compared before every step.
    """

    def __init__(self, scalars: Sequence[tuple[torch.Tensor, int]]) -> None:
        self._scalars = [number.detach() for number, _ in scalars]
        self.shown: list[torch.Tensor] = list(self._scalars)
        self.flats: list[torch.Tensor] = []
        by_kind: dict[Any, list[int]] = defaultdict(list)
        for i, number in enumerate(self._scalars):
            by_kind[number.dtype, number.device].append(i)
        for places in by_kind.values():
            flat = torch.cat([self._scalars[i].expand(scalars[i][1]) for i in places])
            self.flats.append(flat)
            for i, part in zip(places, flat.split([scalars[i][1] for i in places]), strict=True):
                self.shown[i] = part
        self._compared = [flat for flat in self.flats if flat.device.type == "cpu"]  # a GPU would be waited for
        self._written = [flat.clone() for flat in self._compared]

    def write(self) -> None:
        copy_each(self.shown, self._scalars)
        copy_each(self._written, self._compared)

    def are_as_written(self) -> bool:
        """True if the values on the CPU are unchanged. Values on GPUs are not compared, because this would synchronize."""
        return all(map(torch.equal, self._compared, self._written))


class ShownState:
    """A snapshot of the state in the user's optimizers after mirrorc's last write.

    Each step compares identities, names and version counters with the snapshot, by loops in C.
    """

    def __init__(self) -> None:
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        self._is_empty = True
        self._states: list[Any] = []  # what each parameter has
        self._dicts: list[dict[str, Any]] = []  # the dicts among these
        self._names: list[str] = []
        self._values: list[Any] = []
        self._counted: list[torch.Tensor] = []
        self._versions: list[int] = []

    def put(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        states: Iterable[tuple[torch.optim.Optimizer, torch.Tensor, Mapping[str, Any]]],
        counted: Iterable[torch.Tensor],
    ) -> None:
        """Adds entries to the state of parameters, in the same dicts. Idempotent.

        Args:
            counted: tensors whose versions show writes to these entries.
        """
        for optimizer, parameter, entries in states:
            optimizer.state.setdefault(parameter, {}).update(entries)
        self._is_empty, self._optimizers = False, optimizers
        self._counted = list(counted)
        self.look_again()
        self.count_versions()

    def look_again(self) -> None:
        if self._is_empty:
            return
        self._states = self._states_now()
        self._dicts = [entries for entries in self._states if isinstance(entries, dict)]
        self._names = list(chain.from_iterable(self._dicts))
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))

    def _states_now(self) -> list[Any]:
        return list(chain.from_iterable(optimizer.state.values() for optimizer in self._optimizers))

    def forget(self) -> None:
        self._is_empty = True

    def count_versions(self) -> None:
        self._versions = [tensor._version for tensor in self._counted]

    def has_changed(self) -> bool:
        if self._is_empty:
            return False
        return not (
            are_the_same(self._states_now(), self._states)
            and are_the_same(list(chain.from_iterable(map(dict.values, self._dicts))), self._values)
            and list(chain.from_iterable(self._dicts)) == self._names
            and [tensor._version for tensor in self._counted] == self._versions
        )


def are_the_same(now: list[Any], then: list[Any]) -> bool:
    """Compares identities, because a comparison of tensors is element-wise."""
    return len(now) == len(then) and all(map(is_, now, then))


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
