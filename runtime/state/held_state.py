"""What steps over the same parameters hold together: variables and optimizers, and whether these are whole."""

from __future__ import annotations

import os
import weakref
from collections.abc import Hashable, Mapping, Sequence

import torch

from mirrorc.ir.devices import Device
from mirrorc.optimizer_groups import OptimizerGroups
from mirrorc.runtime.state.bucket_optimizers import BucketOptimizers
from mirrorc.runtime.state.variables import VariableStore


class HeldState:
    """The variables and the optimizers' state, which one step holds, or several in turn; `held_state` finds it.

    A step that finds it goes on in the memory in which the others have left it: nothing is copied between them.

    Attributes:
        store: the variables of all replicas.
        optimizers: the optimizers' state and updates.
        layout: the number of the present layout of memory; when it changes, views of the memory must be made anew.
        is_whole: whether the state is consistent.
        gradients_writer: the writer of the gradients in the buckets; None after a failure.
        callers: who calls a step over it now; see `mirrorc.exclusive_calls.ExclusiveCalls`.
    """

    def __init__(self, store: VariableStore, optimizers: BucketOptimizers) -> None:
        self.store, self.optimizers = store, optimizers
        self.layout = 0
        self.is_whole = True
        self.gradients_writer: Hashable = None
        self.callers: dict[str, tuple[int, object]] = {}
        self._num_steps = 1
        self._pid = os.getpid()

    def can_be_held_for(
        self, tensors: Mapping[str, torch.Tensor], devices: Sequence[Device], groups: OptimizerGroups
    ) -> bool:
        """Whether it is the state of these variables, under these names, with this optimizer on these devices.

        A list of several optimizers counts its groups in the order in which they were added, which steps may see in other orders.
        """
        own, known = self.store.tensors, self.optimizers.groups.optimizers
        names = {id(tensor): name for name, tensor in own.items()}
        return (
            self._num_steps > 0
            and self._pid == os.getpid()
            and len(known) == len(groups.optimizers) == 1
            and known[0] is groups.optimizers[0]
            and tuple(self.store.devices) == tuple(devices)
            and all(own.get(name, tensor) is tensor for name, tensor in tensors.items())
            and all(names.get(id(tensor), name) == name for name, tensor in tensors.items())
        )

    def hold(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Lets one more step hold it, which may have further variables, such as those of its loss."""
        self.store.tensors.update(tensors)
        self._num_steps += 1

    def let_go(self) -> None:
        """Called when a step that holds it is closed. After the last one, the user's optimizers are watched no more."""
        self._num_steps -= 1
        if not self._num_steps:
            self.optimizers.user_steps.close()


_held: weakref.WeakSet[HeldState] = weakref.WeakSet()


def held_state(
    tensors: Mapping[str, torch.Tensor], devices: Sequence[Device], groups: OptimizerGroups, *, is_captured: bool
) -> HeldState:
    """The state for a new step: that of another open step over the same variables, or a new one.

    Args:
        tensors: the user's parameters and buffers, by name of their variable.
        devices: the devices, in order of replicas.
        groups: the user's optimizers.
        is_captured: whether updates are captured in CUDA graphs, which know the memory of one step.
    """
    for held in list(_held) if not is_captured else ():
        if held.can_be_held_for(tensors, devices, groups):
            held.hold(tensors)
            return held
    store = VariableStore(tensors, devices)
    held = HeldState(store, BucketOptimizers(groups, store, is_captured=is_captured))
    if not is_captured:
        _held.add(held)
    return held
