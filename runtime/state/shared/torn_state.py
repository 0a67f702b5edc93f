"""State after a partial update: some parameters and optimizer state are updated, others are not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted, listed
from mirrorc.runtime.state.variables.variables import Watched
from mirrorc.torch_internals import calls_step_hooks

_torn: weakref.WeakSet[TornState] = weakref.WeakSet()


class TornState:
    """Parameters and optimizers after a partial update.

    Steps refuse calls until the user has written or replaced every parameter and every entry of the optimizers'
    state. `guard` also refuses saves.
    """

    def __init__(
        self, clause: str, parameters: Mapping[str, torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self.clause = clause
        self._parameters = {name: Watched.of(tensor, None) for name, tensor in parameters.items()}
        self._ids = {id(tensor) for tensor in parameters.values()}
        self._states = [
            (optimizer, parameter, entries, key, value, _version(value))
            for optimizer in optimizers
            for parameter, entries in optimizer.state.items()
            if isinstance(entries, dict)
            for key, value in entries.items()
        ]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._is_restored = False
        _torn.add(self)

    @property
    def is_restored(self) -> bool:
        if not self._is_restored and not self._unwritten() and not self._unwritten_optimizers():
            self._is_restored = True
            self._parameters, self._states = {}, []
        return self._is_restored

    def _unwritten(self) -> list[str]:
        return [name for name, watched in self._parameters.items() if not watched.has_changed()]

    def _unwritten_optimizers(self) -> list[str]:
        left = [
            type(optimizer).__name__
            for optimizer, parameter, entries, key, value, version in self._states
            if optimizer.state.get(parameter) is entries  # load_state_dict puts new ones there
            and entries.get(key) is value
            and _version(value) == version
        ]
        return list(dict.fromkeys(left))

    def guard(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Makes copies and pickles of the model, and `state_dict` of its modules and the optimizers, raise an error."""
        refusal = _Refusal(self)
        owners = [owner for owner in model.modules() if self.concerns([*map(id, owner.parameters(recurse=False))])]
        self._handles += [module.register_state_dict_pre_hook(refusal) for module in owners]
        self._handles += [
            optimizer.register_state_dict_pre_hook(refusal) for optimizer in optimizers if calls_step_hooks(optimizer)
        ]

    def concerns(self, ids: Collection[int]) -> bool:
        return not self._ids.isdisjoint(ids)

    def refuse(self) -> None:
        if self.is_restored:
            return
        names, optimizers = self._unwritten(), self._unwritten_optimizers()
        missing = [f"{counted(len(names), 'parameter')} ({listed(names)})"] if names else []
        missing += [f"the state of {listed(optimizers)}"] if optimizers else []
        raise problem(
            ExecutionError,
            "MC5010: a step has failed in the middle of its update: some parameters are new, others old",
            self.clause,
            "load a checkpoint: model.load_state_dict(...) and optimizer.load_state_dict(...)",
            now=f"nothing uses or saves them until all are restored; still to be restored: {listed(missing)}",
        )

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _torn.discard(self)


class _Refusal:
    """A hook that raises an error when torn state is saved, or when the model with this hook is copied."""

    def __init__(self, torn: TornState) -> None:
        self._torn = torn

    def __call__(self, *_: Any) -> None:
        self._torn.refuse()

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[[], Any], tuple[()]]:
        self._torn.refuse()
        return _idle_hook, ()


def _idle_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    pass


def refuse_torn(ids: Collection[int]) -> None:
    for torn in [torn for torn in list(_torn) if torn.concerns(ids)]:
        torn.refuse()
        torn.end()


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) else 0
