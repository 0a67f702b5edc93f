"""What steps over the same parameters hold together: variables, and whether these are whole."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mirrorc.errors import ExecutionError
from mirrorc.ir.devices import Device
from mirrorc.optimizer_groups import OptimizerGroups
from mirrorc.printing.wording import listed
from mirrorc.runtime.state.bucket_optimizers import BucketOptimizers
from mirrorc.runtime.state.callers import Callers
from mirrorc.runtime.state.reserved_memory import ReservedMemory
from mirrorc.runtime.state.step_variables import StepVariables, names_in_store
from mirrorc.runtime.state.user_steps import OwnSteps
from mirrorc.runtime.state.variables import VariableStore


@dataclass(frozen=True, eq=False)
class Hold:
    """What one step has of a held state. Only the step's state refers to it: it ends when that is closed, or forgotten.

    Attributes:
        store: what the step sees of the variables.
        optimizers: the state and the updates of its optimizers, which other steps may have, too.
    """

    store: StepVariables
    optimizers: BucketOptimizers


class HeldState:
    """The variables that one step holds, or several in turn, and the state of their optimizers; `hold_state` finds it.

    A step that finds it goes on in the memory in which the others have left it: nothing is copied between them. Their optimizers
    update the same parameters, or different ones.

    Attributes:
        store: the variables of all replicas.
        reserved: memory for large results of regions.
        layout: the number of the present layout of memory; when it changes, views of the memory must be made anew.
        is_whole: whether the variables are consistent.
        gradients_writer: the writer of the gradients in the buckets; None after a failure.
        callers: who calls a step over it now, or over another state that has variables in common with it.
        is_used: whether a step over it has run, or was prepared.
    """

    def __init__(self, store: VariableStore, is_captured: bool) -> None:
        self.store = store
        self.reserved = ReservedMemory(store.devices)
        self.layout = 0
        self.is_whole = True
        self.gradients_writer: Hashable = None
        self.callers = Callers()
        self.is_used = False
        self._own_steps = OwnSteps()
        self._read: dict[int, weakref.ref[torch.Tensor]] = {}  # tensors that are no variables here, by id
        self._is_captured = is_captured
        self._optimizers: dict[BucketOptimizers, weakref.WeakSet[Hold]] = {}  # and the open steps' holds of each
        self._pid = os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether an open step of this process holds it."""
        return bool(self._open_optimizers()) and self._pid == os.getpid()

    def _open_optimizers(self) -> list[BucketOptimizers]:
        """Those that open steps have."""
        return [optimizers for optimizers, holds in list(self._optimizers.items()) if holds]

    def _trained(self) -> set[int]:
        """The ids of the parameters that its steps may update."""
        return set().union(*(optimizers.groups.parameters() for optimizers in self._open_optimizers()))

    def first_in_common(self, tensors: Iterable[torch.Tensor], trained: Collection[int] = ()) -> str | None:
        """The first of its variables among some tensors that its steps may write, or others: parameters that neither trains
        may be read by both.

        Args:
            tensors: the variables of the others, or what they read.
            trained: the ids of the parameters that the others may update.
        """
        written = self._trained().union(trained)
        common = (tensor for tensor in tensors if id(tensor) in self.store.names)
        found = (one for one in common if id(one) in written or not isinstance(one, torch.nn.Parameter))
        return next((self.store.names[id(tensor)] for tensor in found), None)

    def reads(self, tensors: Collection[torch.Tensor]) -> None:
        """Notes what a step reads besides variables, which may be those of another one: these run one after the other.

        Raises:
            ExecutionError: see `Callers.join`.
        """
        self._read |= {id(tensor): weakref.ref(tensor) for tensor in tensors}
        others = [held.callers for held in list(_held) if held.is_open and held.first_in_common(tensors)]
        self.callers.join(others, [held.callers for held in list(_held)])

    def has_read(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether a step has read some of these tensors, which are no variables of its own."""
        return any(id(tensor) in self._read and self._read[id(tensor)]() is tensor for tensor in tensors)

    def can_be_held_for(self, devices: Sequence[Device], groups: OptimizerGroups) -> bool:
        """Whether steps on these devices can go on in its memory: their optimizers update the same parameters as those that are
        there, or none of them. Parts of a bucket cannot be laid out for two.
        """
        own, each = groups.parameters(), [optimizers.groups.parameters() for optimizers in self._open_optimizers()]
        are_apart = all(own == other or own.isdisjoint(other) for other in each)
        return not self._is_captured and tuple(self.store.devices) == tuple(devices) and are_apart

    def hold(self, tensors: Mapping[str, torch.Tensor], groups: OptimizerGroups, what: str) -> Hold:
        """Lets one more step hold it, which may have further variables, such as those of its loss.

        Args:
            tensors: the step's parameters and buffers, under its own names.
            groups: its optimizers. One that several steps have makes one update of one state; so do equal lists.
            what: names the model, where its variables have names that others have already.
        """
        names = names_in_store(tensors, self.store, what)
        self.store.add({names[name]: tensor for name, tensor in tensors.items()})
        known = (optimizers for optimizers in self._open_optimizers() if optimizers.groups.numbers_as(groups))
        optimizers = next(known, None)
        if optimizers is None:
            optimizers = BucketOptimizers(groups, self.store, self._own_steps, is_captured=self._is_captured)
        hold = Hold(StepVariables(tensors, names, self.store, optimizers.owner), optimizers)
        self._optimizers.setdefault(optimizers, weakref.WeakSet()).add(hold)
        if not self.callers.now:  # otherwise, the next call does it
            self._free_forgotten()
        return hold

    def let_go(self, hold: Hold) -> None:
        """Called when a step is closed. After the last one that has its optimizers, they are watched no more."""
        holds = self._optimizers[hold.optimizers]
        holds.discard(hold)
        if not holds:
            self._free(hold.optimizers)
        if not self._open_optimizers():
            self._free_forgotten()
            self.reserved.release()

    def _free(self, optimizers: BucketOptimizers) -> None:
        if self._optimizers.pop(optimizers, None) is not None:
            optimizers.user_steps.close()
            self.store.free_buckets(optimizers.owner)

    def _free_forgotten(self) -> None:
        """Frees what steps have left that were forgotten, not closed. The garbage collector only empties their sets, as it may
        run in any thread, during a call that reads what they had.
        """
        for optimizers, holds in list(self._optimizers.items()):
            if not holds:
                self._free(optimizers)

    def begin_use(self) -> None:
        """Called before each call of a step; refuses to lay variables out that an open step has laid out on other devices.

        Raises:
            ExecutionError: names the first variable, the devices and the remedy.
        """
        self._free_forgotten()
        if self.is_used:
            return
        if self._first_elsewhere() is not None:
            gc.collect()  # a step that nobody can reach any more holds nothing
        found = self._first_elsewhere()
        if found is not None:
            name, theirs = found
            raise ExecutionError(
                f"an open step has {name!r} on {listed(d.name for d in theirs)}, and this one runs on "
                f"{listed(d.name for d in self.store.devices)}: steps over the same parameters have one copy of them on each "
                "device. Close that step first, with its close() or by leaving its with block, or compile both for the same "
                "devices"
            )
        self.is_used = True

    def _first_elsewhere(self) -> tuple[str, Sequence[Device]] | None:
        """A variable that a step on other devices uses, and these devices."""
        for other in list(_held):
            devices = other.store.devices
            if other.is_open and other.is_used and tuple(devices) != tuple(self.store.devices):
                name = self.first_in_common(other.store.tensors.values(), other._trained())
                if name is not None:
                    return name, devices
        return None


_held: weakref.WeakSet[HeldState] = weakref.WeakSet()


def held_state(
    tensors: Mapping[str, torch.Tensor], devices: Sequence[Device], groups: OptimizerGroups, *, is_captured: bool
) -> HeldState:
    """The state for a new step: that of open steps over the same variables, or a new one.

    Args:
        tensors: the user's parameters and buffers, by name of their variable.
        devices: the devices, in order of replicas.
        groups: the user's optimizers.
        is_captured: whether updates are captured in CUDA graphs, which know the memory of one step.

    Raises:
        ExecutionError: a step over some of the variables runs in another thread.
    """
    own, updated = tensors.values(), groups.parameters()
    known = [held for held in list(_held) if held.is_open]
    others = [held for held in known if held.first_in_common(own, updated)]
    if len(others) == 1 and not is_captured and others[0].can_be_held_for(devices, groups):
        found = others[0]
    else:
        found = HeldState(VariableStore(tensors, devices), is_captured)
        _held.add(found)
    written = [tensor for tensor in own if id(tensor) in updated or not isinstance(tensor, torch.nn.Parameter)]
    running_apart = [held.callers for held in known if held in others or held.has_read(written)]
    found.callers.join(running_apart, [held.callers for held in list(_held)])
    return found
