"""Registry of the variables' states in open steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import torch

from mirrorc.errors import ExecutionError
from mirrorc.ir.devices import Device
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import listed
from mirrorc.runtime.state.shared.shared_state import HeldState, Hold
from mirrorc.runtime.state.shared.torn_state import refuse_torn
from mirrorc.runtime.state.variables.variables import VariableStore
from mirrorc.user.optimizer_groups import OptimizerGroups

_held: weakref.WeakSet[HeldState] = weakref.WeakSet()


def held_state(
    tensors: Mapping[str, torch.Tensor], devices: Sequence[Device], groups: OptimizerGroups, *, is_captured: bool
) -> HeldState:
    """The state for a new step: shared with open steps over the same variables if possible, else new."""
    user_tensors, updated = tensors.values(), groups.parameters()
    known = [held for held in list(_held) if held.is_open]
    written = [tensor for tensor in user_tensors if id(tensor) in updated or not isinstance(tensor, torch.nn.Parameter)]
    others = [held for held in known if held.first_in_common(user_tensors, {*map(id, written)})]
    state = None
    if not is_captured and all(held.can_be_held_for(devices, groups) for held in others):
        state = _merge(others)
    if state is None:
        remark = _why_turns_copy(others, devices, is_captured=is_captured)
        state = HeldState(VariableStore(tensors, devices), is_captured, remark)
        _held.add(state)
    state.callers.join([held.callers for held in known if held in others or held.has_read(written)])
    return state


def _why_turns_copy(others: Sequence[HeldState], devices: Sequence[Device], *, is_captured: bool) -> str:
    on_these = [held for held in others if tuple(held.store.devices) == tuple(devices)]
    if not on_these:
        return ""
    if is_captured or any(held.is_captured for held in on_these):
        why, remedy = (
            "a step with cuda_graphs=True has memory of its own",
            "compile both with compiler=mirrorc.Compiler(cuda_graphs=False)",
        )
    else:
        why = "their optimizers have a part of their parameters in common"
        remedy = "give both steps the same optimizers, or optimizers over the same parameters or over different ones"
    return (
        f"another open step has variables of this one, and {why}: each turn copies what the other step has written, and may lay "
        f"the optimizer's state out anew. Remedy: {remedy}"
    )


def begin_use(held: HeldState) -> None:
    """Refuses a call if the state is partly updated, or if an open step has the variables on other devices."""
    refuse_torn(held.store.names.keys())
    held.free_forgotten()
    if not held.is_used:
        _refuse_elsewhere(held, held.store.tensors.values(), ())
        held.is_used = True


def _refuse_elsewhere(held: HeldState, tensors: Collection[torch.Tensor], written: Collection[int]) -> None:
    if _first_elsewhere(held, tensors, written) is not None:
        gc.collect()  # an unreachable step holds nothing
    conflict = _first_elsewhere(held, tensors, written)
    if conflict is not None:
        name, theirs = conflict
        raise problem(
            ExecutionError,
            f"MC5004: another open step or module has {name!r} on {listed(d.name for d in theirs)}, and this one runs on "
            f"{listed(d.name for d in held.store.devices)}",
            "there is one copy of the parameters on each device, for all that share them",
            ("close() the other one first", "devices=[...], the same for both"),
        )


def _first_elsewhere(
    held: HeldState, tensors: Collection[torch.Tensor], written: Collection[int]
) -> tuple[str, Sequence[Device]] | None:
    for other in list(_held):
        devices = other.store.devices
        if other.is_open and other.is_used and tuple(devices) != tuple(held.store.devices):
            name = other.first_in_common(tensors, held.written().union(written))
            if name is not None:
                return name, devices
    return None


def reads(held: HeldState, tensors: Collection[torch.Tensor]) -> None:
    """Records tensors that a step reads as constants. Serializes the step with open steps that may write these."""
    held.note_reads(tensors)
    held.callers.join([other.callers for other in list(_held) if other.is_open and other.first_in_common(tensors)])


def take_in(
    hold: Hold, tensors: Mapping[str, torch.Tensor], counters: Mapping[str, str], written: Collection[str]
) -> None:
    """Adds variables of modules outside of the model to a step. Merges the states of open steps over them if possible."""
    held, ids = hold.held, {id(tensors[name]) for name in written if name in tensors}
    _refuse_elsewhere(held, tensors.values(), ids)
    either = held.trained() | ids
    known = [other for other in list(_held) if other is not held and other.is_open]
    others = [other for other in known if other.first_in_common(tensors.values(), either)]
    held.callers.join([other.callers for other in others])
    _merge([*(other for other in others if other.can_merge_with(held)), held], is_running=True)
    hold.held.take_in(hold, tensors, counters, written)


def _merge(states: Sequence[HeldState], *, is_running: bool = False) -> HeldState | None:
    is_ready = is_running or len(states) == 1 or not any(held.callers.now for held in states)
    if not states or not is_ready or not all(a.can_merge_with(b) for a, b in combinations(states, 2)):
        return None
    for other in states[1:]:
        states[0].absorb(other)
        _held.discard(other)
    return states[0]


def parameters_in_training() -> set[int]:
    return set().union(*(held.trained() for held in list(_held) if held.is_open))
