"""Variables and optimizer state of steps over the same parameters, and the registry of open ones."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import combinations

import torch

from mirrorc.errors import ExecutionError
from mirrorc.ir.devices import Device
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import listed
from mirrorc.runtime.devices.uninterrupted import completed
from mirrorc.runtime.state.optimizers.bucket_optimizers import BucketOptimizers
from mirrorc.runtime.state.optimizers.user_optimizers import InternalSteps
from mirrorc.runtime.state.shared.torn_state import refuse_torn
from mirrorc.runtime.state.variables.layout import ReservedMemory
from mirrorc.runtime.state.variables.step_variables import StepVariables, names_in_store
from mirrorc.runtime.state.variables.variables import VariableStore, counters_among
from mirrorc.user.optimizer_groups import OptimizerGroups


class Callers:
    """Serializes the calls of steps over common variables; see `mirrorc.calls.call_lock.ExclusiveCalls`.

    Attributes:
        now: a dict that all these steps share: thread and owner of the running call, under the key "now".
    """

    def __init__(self) -> None:
        self.now: dict[str, tuple[int, object]] = {}
        _callers.add(self)

    def join(self, others: Sequence[Callers]) -> None:
        """Serializes the calls of several groups of steps. Raises an error if several of them run now."""
        apart = {id(callers.now): callers.now for callers in (self, *others)}.values()
        running = [calls for calls in apart if calls]
        if len(running) > 1:
            raise problem(
                ExecutionError,
                "MC5004: another step or module over some of the same parameters is running in another thread",
                "calls over the same parameters run one after the other",
                ("make all calls from one thread", "with lock: around each call, where lock = threading.Lock()"),
            )
        running_call = running[0] if running else self.now
        for callers in list(_callers):
            if any(callers.now is calls for calls in apart):
                callers.now = running_call


_callers: weakref.WeakSet[Callers] = weakref.WeakSet()


class Hold:
    """A step's reference to a shared state. A merge of states replaces its attributes."""

    def __init__(self, held: HeldState, store: StepVariables, optimizers: BucketOptimizers, model_name: str) -> None:
        self.held, self.store, self.optimizers, self.model_name = held, store, optimizers, model_name


class HeldState:
    """Variables of one or more steps, and the state of their optimizers.

    Steps take turns in one memory without copies. Their optimizers must update equal or disjoint sets of parameters.

    Attributes:
        layout: the layout's number; after a change, steps bind their functions again.
        was_behind: a user's write since the last training step is already mirrored.
        gradients_writer: the writer of the gradients in the buckets; None after a failure.
        remark: why steps copy between each other; empty without copies.
    """

    def __init__(self, store: VariableStore, is_captured: bool, remark: str) -> None:
        self.store = store
        self.reserved = ReservedMemory(store.devices)
        self.layout = 0
        self.is_whole = True
        self.was_behind = False
        self.gradients_writer: Hashable = None
        self.callers = Callers()
        self.is_used = False
        self.remark = remark
        self._internal_steps = InternalSteps()
        self._read: dict[int, weakref.ref[torch.Tensor]] = {}  # tensors other than variables, by id
        self._unwritten: set[int] = set()  # ids of unwritten variables outside of models
        self.is_captured = is_captured
        self._optimizers: dict[BucketOptimizers, weakref.WeakSet[Hold]] = {}  # and the open steps' holds of each
        self._num_holds = 0  # at the last search for unreachable steps
        self._pid = os.getpid()

    @property
    def is_open(self) -> bool:
        return bool(self._open_optimizers()) and self._pid == os.getpid()

    def _open_optimizers(self) -> list[BucketOptimizers]:
        return [optimizers for optimizers, holds in list(self._optimizers.items()) if holds]

    def trained(self) -> set[int]:
        return set().union(*(optimizers.groups.parameters() for optimizers in self._open_optimizers()))

    def written(self) -> set[int]:
        buffers = {id(tensor) for tensor in self.store.tensors.values() if not isinstance(tensor, torch.nn.Parameter)}
        return self.trained() | (buffers - self._unwritten)

    def first_in_common(self, tensors: Iterable[torch.Tensor], written: Collection[int] = ()) -> str | None:
        """The first common variable that either side may write. ``written``: ids that the other side writes."""
        either = self.written().union(written)
        common = (tensor for tensor in tensors if id(tensor) in self.store.names)
        return next((self.store.names[id(tensor)] for tensor in common if id(tensor) in either), None)

    def note_reads(self, tensors: Collection[torch.Tensor]) -> None:
        self._read |= {id(tensor): weakref.ref(tensor) for tensor in tensors}

    def has_read(self, tensors: Iterable[torch.Tensor]) -> bool:
        return any(id(tensor) in self._read and self._read[id(tensor)]() is tensor for tensor in tensors)

    def can_be_held_for(self, devices: Sequence[Device], groups: OptimizerGroups) -> bool:
        parameters = groups.parameters()
        each = [optimizers.groups.parameters() for optimizers in self._open_optimizers()]
        are_apart = all(parameters == other or parameters.isdisjoint(other) for other in each)
        return not self.is_captured and tuple(self.store.devices) == tuple(devices) and are_apart

    def hold(self, tensors: Mapping[str, torch.Tensor], groups: OptimizerGroups, model_name: str) -> Hold:
        """Adds a step, possibly with further variables, such as those of its loss.

        Steps with equal lists of optimizers share one state and one update.
        """
        names = names_in_store(tensors, self.store, model_name)
        self.store.add({names[name]: tensor for name, tensor in tensors.items()}, counters_among(tensors))
        self._unwritten -= {id(tensor) for tensor in tensors.values()}
        known = (optimizers for optimizers in self._open_optimizers() if optimizers.groups.numbers_as(groups))
        optimizers = next(known, None) or self._optimizers_for(groups)
        hold = Hold(self, StepVariables(tensors, names, self.store, optimizers.owner), optimizers, model_name)
        self._optimizers.setdefault(optimizers, weakref.WeakSet()).add(hold)
        self._num_holds += 1
        if not self.callers.now:  # otherwise, the next call does it
            self.free_forgotten()
        return hold

    def _optimizers_for(self, groups: OptimizerGroups) -> BucketOptimizers:
        new = BucketOptimizers(groups, self.store, self._internal_steps, is_captured=self.is_captured)
        new.user_steps.go_on_from([optimizers.user_steps for optimizers in self._open_optimizers()])
        return new

    def take_in(
        self, hold: Hold, tensors: Mapping[str, torch.Tensor], counters: Mapping[str, str], written: Collection[str]
    ) -> None:
        names = names_in_store(tensors, self.store, hold.model_name)
        new = {id(tensor) for tensor in tensors.values()} - self.store.names.keys()
        unwritten = (self._unwritten | new) - {id(tensors[name]) for name in written if name in tensors}
        by_id = {id(tensors[name]): id(tensors[counter]) for name, counter in counters.items()}

        def put_in_place() -> None:
            self.store.add({names[name]: tensor for name, tensor in tensors.items()}, by_id, are_guarded=True)
            self._unwritten = unwritten
            hold.store.add(tensors, names, counters)

        completed(put_in_place)

    def can_merge_with(self, other: HeldState) -> bool:
        are_same = tuple(self.store.devices) == tuple(other.store.devices)
        return are_same and not (self.is_captured or other.is_captured) and self.trained().isdisjoint(other.trained())

    def absorb(self, other: HeldState) -> None:
        """Merges another state into this one. An interrupt leaves both unchanged, or merged.

        Per-replica buffers stay in place; parameters stay until the next layout.
        """
        holds = {optimizers: list(open_holds) for optimizers, open_holds in other._optimizers.items() if open_holds}
        model_name = next((hold.model_name for open_holds in holds.values() for hold in open_holds), "model")
        names = names_in_store(other.store.tensors, self.store, model_name)
        read = {id(tensor) for tensor in (*self.store.tensors.values(), *other.store.tensors.values())}
        unwritten = read - self.written() - other.written()
        take_over_variables = self.store.taking_over(other.store, names)
        moved: list[tuple[Hold, BucketOptimizers, StepVariables]] = []
        joined = dict(self._optimizers)
        for optimizers, open_holds in holds.items():
            new = self._optimizers_for(optimizers.groups)
            new.user_steps.go_on_as(optimizers.user_steps)
            for hold in open_holds:
                known = {name: names[other.store.names[id(tensor)]] for name, tensor in hold.store.tensors.items()}
                moved.append((hold, new, hold.store.moved(known, self.store, new.owner)))
            joined[new] = weakref.WeakSet(open_holds)
        layout, num_holds = max(self.layout, other.layout) + 1, self._num_holds + other._num_holds

        def put_in_place() -> None:
            take_over_variables()
            for hold, optimizers, store in moved:
                hold.held, hold.optimizers, hold.store = self, optimizers, store
            for optimizers in holds:
                optimizers.user_steps.close()
            self._optimizers, self._unwritten = joined, unwritten
            self.layout, self._num_holds = layout, num_holds
            self.is_whole, self.is_used = self.is_whole and other.is_whole, self.is_used or other.is_used
            self.was_behind = self.was_behind or other.was_behind
            self.gradients_writer = None
            self._read |= other._read
            other._optimizers = {}
            other.reserved.release()

        completed(put_in_place)

    def let_go(self, hold: Hold) -> None:
        holds = self._optimizers[hold.optimizers]
        holds.discard(hold)
        if not holds:
            self._free(hold.optimizers)
        if not self._open_optimizers():
            self.free_forgotten()
            self.reserved.release()
        elif not self.callers.now:  # otherwise, the next call does it
            self.free_forgotten()

    def _free(self, optimizers: BucketOptimizers) -> None:
        if self._optimizers.pop(optimizers, None) is not None:
            optimizers.user_steps.close()
            self.store.free_buckets(optimizers.owner)

    def free_forgotten(self) -> None:
        """Frees the state of unreachable steps, whose holds the garbage collector has removed in some thread."""
        for optimizers, holds in list(self._optimizers.items()):
            if not holds:
                self._free(optimizers)
        num_holds = sum(map(len, self._optimizers.values()))
        if num_holds < self._num_holds:
            self.release()
        self._num_holds = num_holds

    def release(self) -> None:
        holds = [hold for open_holds in self._optimizers.values() for hold in open_holds]
        ids = {id(tensor) for hold in holds for tensor in hold.store.tensors.values()}

        def put_in_place() -> None:
            self.store.keep_only(ids)
            self._unwritten &= self.store.names.keys()

        completed(put_in_place)


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
