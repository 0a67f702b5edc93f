"""The user's optimizers over buckets: flat if element-wise, else by their own `step`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.runtime.devices.process_memory import return_freed_memory
from mirrorc.runtime.state.optimizers.flat_optimizer import FlatOptimizer, SlotOptimizer, UpdateMemory, update_memory
from mirrorc.runtime.state.optimizers.flat_state import FlatState, Laid, Shown, UserState
from mirrorc.runtime.state.optimizers.user_optimizers import (
    InternalSteps,
    ShownNumbers,
    ShownState,
    UserSteps,
    are_the_same,
    has_dealt_state,
    refuse_dealt_state,
    watch_dealt_state,
)
from mirrorc.runtime.state.variables.layout import FlatBucket, slot_views
from mirrorc.runtime.state.variables.variables import VariableStore
from mirrorc.torch_internals import storage_key
from mirrorc.user.optimizer_groups import OptimizerGroups
from mirrorc.user.optimizer_kinds import (
    check_gradient_of,
    check_hyperparameters,
    check_state,
    sparse_gradient,
    state_signature,
    state_switches,
)

_numbers = itertools.count()


class BucketOptimizers:
    """The state and the updates of all buckets on all replicas.

    The user's optimizers remain the interface. Their hyperparameters are read before every step. Their ``state`` holds
    views of replica 0's flat state, so ``state_dict()`` and ``load_state_dict()`` work.

    Args:
        is_captured: with CUDA graphs. The learning rate is then a 32-bit tensor on the first device, for torch's fused
            kernels.
    """

    def __init__(
        self, groups: OptimizerGroups, store: VariableStore, internal_steps: InternalSteps, *, is_captured: bool = False
    ) -> None:
        self.groups = groups
        self.user_steps = UserSteps(groups.optimizers, internal_steps)
        self.owner = next(_numbers)
        self.is_whole = True
        self._internal_steps, self._store, self._shown = internal_steps, store, ShownState()
        self._state = FlatState((), self._flat_optimizer, self._user_states)
        self._entries: list[int] = []
        self._switches: list[tuple[bool, bool, bool]] = []  # that the state was last checked for
        self._numbers = ShownNumbers([])
        self._fit_for_rows: list[Any] = []  # last hyperparameters checked for sparse gradients, without learning rates
        self._hyperparameters: list[Any] = []  # the user's values at the last sync
        self._is_captured = is_captured
        self._rates: dict[int, torch.Tensor] = {}  # learning rate of each group, if captured
        self._has_run_by_itself = False
        self.is_fresh = False  # the next step makes state, and nothing else writes any
        self._gathered: Mapping[tuple[int, str], torch.Tensor] | None = None  # shown until the next step

    @property
    def leave_gradients(self) -> bool:
        """True if updates leave gradients unchanged; torch's foreach implementations may write them."""
        return not any(group.get("foreach") for group in self.groups.hyperparameters)

    def lay_out(self, buckets: Sequence[FlatBucket]) -> Laid:
        """Prepares flat optimizers with the user's state. The user's state stays until `adopt`."""
        self._write_rates_for_graphs()
        elementwise = [flat for flat in buckets if flat.bucket.rule.elementwise]
        if self._keeps_dealt_state(elementwise):
            state = FlatState(elementwise, self._flat_optimizer, self._user_states, self._state)
            return Laid(state, state.shown(self._gathered), self._gathered)
        for optimizer in self.groups.optimizers:
            refuse_dealt_state(optimizer, "memory for the optimizer's state is to be laid out anew, with other buckets")
        self._check_state(elementwise)
        state = FlatState(elementwise, self._flat_optimizer, self._user_states)
        return Laid(state, state.shown())

    def _keeps_dealt_state(self, buckets: Sequence[FlatBucket]) -> bool:
        are_same = [flat.bucket for flat in buckets] == [flat.bucket for flat in self._state.buckets]
        return are_same and any(True for _ in self._state.parts()) and not self.is_stale()

    def are_dealt_otherwise(self, buckets: Sequence[Bucket]) -> bool:
        """True if the state is sharded by another bucket plan. It must then be gathered first."""
        elementwise = [bucket for bucket in buckets if bucket.rule.elementwise]
        are_others = self.are_sharded and elementwise != [flat.bucket for flat in self._state.buckets]
        return are_others and self.is_dealt and not self.is_stale()

    def adopt(self, laid: Laid) -> None:
        self._state, self._gathered = laid.state, laid.gathered
        self._note_whether_fresh()
        self._show(laid.shown)

    def _note_whether_fresh(self) -> None:
        is_elementwise = all(flat.bucket.rule.elementwise for flat in self._store.buckets_of(self.owner))
        self.is_fresh = is_elementwise and not self._state.is_complete

    def _check_state(self, buckets: Sequence[FlatBucket]) -> None:
        for flat in buckets:
            optimizer, index = self.groups[flat.bucket.rule.group]
            for slot in flat.bucket.slots:
                check_state(optimizer, index, slot.variable, self._parameter(slot.variable))
        self._switches = state_switches(self.groups.hyperparameters)

    def _flat_optimizer(self, bucket: Bucket, parameters: torch.Tensor) -> FlatOptimizer:
        optimizer, index = self.groups[bucket.rule.group]
        return FlatOptimizer(optimizer, index, parameters, self._rates.get(bucket.rule.group))

    def _user_states(self, bucket: Bucket) -> list[UserState]:
        optimizer, _ = self.groups[bucket.rule.group]
        return [optimizer.state.get(self._parameter(slot.variable), {}) for slot in bucket.slots]

    def _parameter(self, name: str) -> torch.nn.Parameter:
        parameter = self._store.tensors[name]
        assert isinstance(parameter, torch.nn.Parameter)
        return parameter

    def is_stale(self) -> bool:
        return self.user_steps.have_written or self._shown.has_changed() or not self._numbers.are_as_written()

    def fits(self, buckets: Sequence[Bucket]) -> bool:
        """True if all parameters of each element-wise bucket have equal state entries and scalars, or are optional."""
        return all(
            len({state_signature(state) for state in self._user_states(bucket)}) == 1
            for bucket in buckets
            if bucket.rule.elementwise and not bucket.rule.may_be_unused
        )

    def write_other_rows(self, buckets: Sequence[Bucket]) -> bool:
        rules = [bucket.rule for bucket in buckets if bucket.rule.takes_rows]
        if not rules:
            return False
        write_rows = self.groups.write_rows()
        return any(rule.writes_rows != write_rows[rule.group] for rule in rules)

    def sync_hyperparameters(self) -> None:
        self._write_rates_for_graphs()
        held = list(chain.from_iterable(map(dict.values, self.groups.hyperparameters)))
        if are_the_same(held, self._hyperparameters):  # changes within a value are shared
            return
        for optimizer in self.groups.optimizers:
            check_hyperparameters(optimizer)
        if self._state.buckets and self._switches != state_switches(self.groups.hyperparameters):
            self._check_state(self._state.buckets)
            self._note_whether_fresh()
        self._check_rows()
        for flat in self._state.optimizers.values():
            flat.sync()
        self._hyperparameters = held

    def _check_rows(self) -> None:
        tables = [flat for flat in self._store.buckets_of(self.owner) if flat.bucket.rule.takes_rows]
        if tables:
            held = [value for group in self.groups.hyperparameters for key, value in group.items() if key != "lr"]
            if are_the_same(held, self._fit_for_rows):
                return
            for flat in tables:
                optimizer, index = self.groups[flat.bucket.rule.group]
                name = flat.bucket.slots[0].variable
                check_gradient_of(optimizer, index, name, self._parameter(name), is_sparse=True)
            self._fit_for_rows = held

    def _write_rates_for_graphs(self) -> None:
        if not self._is_captured:
            return
        for number in range(len(self.groups)):
            if number not in self._rates:
                device = self._store.devices[0].torch_device
                self._rates[number] = torch.empty((), dtype=torch.float32, device=device)
            optimizer, index = self.groups[number]
            rate = optimizer.param_groups[index]["lr"]
            if isinstance(rate, torch.Tensor):
                self._rates[number].copy_(rate.reshape(()))
            else:
                self._rates[number].fill_(rate)

    def baked_hyperparameters(self) -> tuple[tuple[Any, ...], ...]:
        return tuple(
            tuple(group[name] for name in optimizer.defaults if name != "lr")
            for optimizer in self.groups.optimizers
            for group in optimizer.param_groups
        )

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Makes flat optimizers capturable, as torch's Adam requires. Outside of captures, torch would warn."""
        groups = [flat.optimizer.param_groups[0] for flat in self._state.optimizers.values()]
        groups = [group for group in groups if "capturable" in group]
        for group in groups:
            group["capturable"] = True
        try:
            yield
        finally:
            for group in groups:
                group["capturable"] = False

    def flat_optimizer(self, bucket: int, replica: int) -> FlatOptimizer:
        return self._state.optimizers[(bucket, replica)]

    def slot_optimizer(self, bucket: int, replica: int) -> SlotOptimizer | None:
        return self._state.by_slot.get((bucket, replica))

    def copies(self) -> Iterator[tuple[Bucket, str, list[torch.Tensor]]]:
        return self._state.copies()

    def held(self) -> list[torch.Tensor]:
        return [tensor for entries in self._state.whole.values() for tensor in entries.values()]

    def finish_step(self) -> None:
        has_new = self._entries != self._state.entries()  # an optimizer makes its state in its first step
        if has_new or self._gathered is not None:
            self._state.hold_new_state()
            self._gathered = None
            self._show(self._state.shown())
            return_freed_memory()  # the parts of the state have been copied together
        self._numbers.write()
        self._shown.count_versions()
        self.is_fresh = False

    @property
    def are_sharded(self) -> bool:
        return any(flat.bucket.part is not None for flat in self._state.buckets)

    @property
    def is_dealt(self) -> bool:
        """True if other workers have shards of the state."""
        return any(map(has_dealt_state, self.groups.optimizers))

    def gather(self, all_gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Puts the whole state into the user's optimizers until the next step; collective over all workers."""
        self._gathered = {(bucket, key): all_gather(part) for bucket, key, part in self._state.parts()}
        self._show(self._state.shown(self._gathered))

    def _show(self, shown: Shown) -> None:
        self._numbers = shown.numbers
        self._entries = self._state.entries()
        if not self._state.buckets:
            self._shown.forget()
            return
        whole = [tensor for entries in self._state.whole.values() for tensor in entries.values()]
        whole += list((self._gathered or {}).values())
        trains = {s.variable: self.groups[f.bucket.rule.group][0] for f in self._state.buckets for s in f.bucket.slots}
        if self.are_sharded:
            for optimizer in self.groups.optimizers:
                watch_dealt_state(optimizer, self._internal_steps)
        optimizers = list({id(optimizer): optimizer for optimizer in trains.values()}.values())
        states = (
            (trains[name], self._parameter(name), state) for name, state in shown.states.items() if state is not None
        )
        self._shown.put(optimizers, states, (*whole, *self._numbers.flats))

    def update_memory(self, bucket: Bucket, parameters: Sequence[torch.Tensor]) -> UpdateMemory:
        optimizer, index = self.groups[bucket.rule.group]
        first = parameters[0]
        state = {} if has_dealt_state(optimizer) else optimizer.state.get(first, {})
        return update_memory(optimizer, index, bucket.dtype, first.device, state)

    def user_state_bytes(self, buckets: Iterable[tuple[Bucket, Sequence[torch.Tensor]]]) -> int | None:
        """Bytes of the state in optimizers whose own `step()` runs; None before their first step."""
        states = [
            self.groups[bucket.rule.group][0].state.get(parameter, {})
            for bucket, parameters in buckets
            for parameter in parameters
        ]
        tensors = [part for state in states for value in state.values() for part in _dense_parts(value)]
        if not tensors and not self._has_run_by_itself:
            return None
        return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())

    def step_by_itself(
        self, buckets: Sequence[int], *gradients: torch.Tensor, unused: Sequence[Collection[int]]
    ) -> None:
        """Steps the user's optimizers of these buckets on replica 0's parameters.

        Args:
            unused: for each bucket, the indices of slots without a gradient.
        """
        flats = self._store.buckets_of(self.owner)
        owners = {id(self.groups[flats[index].bucket.rule.group][0]) for index in buckets}
        running = [optimizer for optimizer in self.groups.optimizers if id(optimizer) in owners]
        for optimizer in running:
            optimizer.zero_grad(set_to_none=True)
        members: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        for index, gradient, left_out in zip(buckets, gradients, unused, strict=True):
            flat = flats[index]
            homes = slot_views(flat.parameters[0], flat.bucket)
            views = zip(flat.bucket.slots, homes, _gradients(flat, gradient), strict=True)
            for place, (slot, home, view) in enumerate(views):
                parameter = self._parameter(slot.variable)
                parameter.grad = view if place not in left_out else None
                members.append((parameter, home))
        try:
            with (
                torch.enable_grad(),
                self._internal_steps.running(running),
            ):  # as in a training loop: its hooks may use autograd
                for optimizer in running:
                    optimizer.step()
            self._has_run_by_itself = True
            self._shown.look_again()  # it may have made state that other optimizers hold, too
        finally:
            for parameter, home in members:
                parameter.grad = None
                if parameter.data_ptr() != home.data_ptr():  # an optimizer may replace a parameter's tensor
                    home.copy_(parameter.detach())
                    parameter.data = home


def _gradients(flat: FlatBucket, reduced: torch.Tensor) -> list[torch.Tensor]:
    if not flat.bucket.rule.takes_rows:
        return slot_views(reduced, flat.bucket)
    return [sparse_gradient(flat.touched[0], reduced, flat.bucket.slots[0].shape)]


def _dense_parts(value: Any) -> list[torch.Tensor]:
    """Dense tensors only, because the momentum of sparse gradients is sparse."""
    if not isinstance(value, torch.Tensor):
        return []
    return [value._indices(), value._values()] if value.is_sparse else [value]
