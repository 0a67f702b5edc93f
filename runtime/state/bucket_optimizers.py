"""Runs the user's optimizer: on whole buckets if it is element-wise, otherwise by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.optimizers import SCALAR_STATE, state_signature
from mirrorc.runtime.devices.process_memory import return_freed_memory
from mirrorc.runtime.state.flat_optimizer import FlatOptimizer, UpdateMemory, update_memory
from mirrorc.runtime.state.variables import FlatBucket, VariableStore, slot_views
from mirrorc.torch_internals import storage_key


class BucketOptimizers:
    """The state and the updates of all buckets on all replicas.

    The user's optimizer stays the interface: its hyperparameters are read before every step, and its ``state`` holds views
    of replica 0's flat state, so that ``state_dict()`` and ``load_state_dict()`` work.

    Args:
        optimizer: the user's.
        store: the variables.
        is_captured: whether updates are captured in CUDA graphs. The learning rate is then a 32-bit tensor on the first device,
            as torch's fused kernels require.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, store: VariableStore, *, is_captured: bool = False) -> None:
        self.user_optimizer = optimizer
        self._store = store
        self._flat: dict[tuple[int, int], FlatOptimizer] = {}
        self._shown: list[tuple[torch.nn.Parameter, Any]] = []  # the state that was put into the user's optimizer
        self._entries: list[int] = []
        self._versions: list[int] = []
        self._scalars: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_captured = is_captured
        self._rates: dict[int, torch.Tensor] = {}  # learning rate of each group, if captured
        self._whole: dict[int, dict[str, torch.Tensor]] = {}  # a bucket's state entries, as long as the bucket
        self._has_run_by_itself = False

    @property
    def leave_gradients(self) -> bool:
        """Whether updates leave gradients unchanged; torch's foreach implementations may use their memory."""
        return not any(group.get("foreach") for group in self.user_optimizer.param_groups)

    def lay_out(self) -> None:
        """Makes flat optimizers for the store's buckets, with the state that the user's optimizer has."""
        self._flat.clear()
        self._whole.clear()
        self._write_rates()
        for flat in self._elementwise():
            for replica, parameters in enumerate(flat.parameters):
                start, stop = flat.bucket.share(replica, len(flat.parameters))
                if start < stop:
                    group = flat.bucket.rule.group
                    own = FlatOptimizer(self.user_optimizer, group, parameters[start:stop], self._rates.get(group))
                    self._flat[(flat.bucket.index, replica)] = own
            self._take_over(flat.bucket)
        self._publish()
        return_freed_memory()  # parameters and state have moved into buckets

    def _elementwise(self) -> list[FlatBucket]:
        return [flat for flat in self._store.buckets if flat.bucket.rule.elementwise]

    def _user_states(self, bucket: Bucket) -> list[Mapping[str, Any]]:
        return [self.user_optimizer.state.get(self._parameter(slot.variable), {}) for slot in bucket.slots]

    def _parameter(self, name: str) -> torch.nn.Parameter:
        parameter = self._store.tensors[name]
        assert isinstance(parameter, torch.nn.Parameter)
        return parameter

    def _replicas(self, bucket: Bucket) -> dict[int, FlatOptimizer]:
        """The flat optimizers of a bucket, by replica; a replica has none if its share of a small bucket is empty."""
        keys = [(bucket.index, replica) for replica in range(len(self._store.devices))]
        return {replica: self._flat[(index, replica)] for index, replica in keys if (index, replica) in self._flat}

    def _first(self, bucket: Bucket) -> FlatOptimizer:
        return next(iter(self._replicas(bucket).values()))

    def _take_over(self, bucket: Bucket) -> None:
        """Gives the flat optimizers of a bucket the state that the user's optimizer has for its parameters."""
        states = self._user_states(bucket)
        for key, first in states[0].items():
            if first is None:
                continue
            if key in SCALAR_STATE:
                value = first.detach() if isinstance(first, torch.Tensor) else torch.tensor(float(first))
                for own in self._replicas(bucket).values():
                    is_fused = own.optimizer.param_groups[0].get("fused")
                    own.state[key] = value.to(own.parameter.device if is_fused else value.device, copy=True)
                continue
            whole = torch.zeros(
                bucket.num_elements, dtype=first.dtype, device=self._store.buckets[bucket.index].parameters[0].device
            )
            for view, state in zip(slot_views(whole, bucket), states, strict=True):
                view.copy_(state[key])
            self._hold(bucket, key, whole)

    def _hold(self, bucket: Bucket, key: str, whole: torch.Tensor) -> None:
        """Gives each flat optimizer of a bucket its part of a state tensor that is as long as the bucket: a share, or a copy."""
        for replica, own in self._replicas(bucket).items():
            start, stop = bucket.share(replica, len(self._store.devices))
            is_view = bucket.owner_of_parameters(replica) == 0
            own.state[key] = whole[start:stop] if is_view else whole.to(own.parameter.device, copy=True)
        self._whole.setdefault(bucket.index, {})[key] = whole

    def is_stale(self) -> bool:
        """Whether the user has changed the state in the optimizer, by loading other state or by writing in place."""
        state = self.user_optimizer.state
        return (
            any(state.get(parameter) is not shown for parameter, shown in self._shown)
            or self._versions != self._present_versions()
        )

    def _present_versions(self) -> list[int]:
        """The version counters of the tensors in the user's optimizer, which count in-place writes."""
        whole = [tensor._version for entries in self._whole.values() for tensor in entries.values()]
        return whole + [shown._version for shown, _ in self._scalars]

    def fits(self, buckets: Sequence[Bucket]) -> bool:
        """Whether these buckets can hold the user's state: all parameters of a bucket must have the same entries and scalars."""
        return all(
            len({state_signature(state) for state in self._user_states(bucket)}) == 1
            for bucket in buckets
            if bucket.rule.elementwise
        )

    def sync_hyperparameters(self) -> None:
        """Takes over hyperparameters that changed since the last step."""
        self._write_rates()
        for own in self._flat.values():
            own.sync()

    def _write_rates(self) -> None:
        """Writes the learning rates into the tensors that captured updates read."""
        if not self._is_captured:
            return
        for index, group in enumerate(self.user_optimizer.param_groups):
            if index not in self._rates:
                device = self._store.devices[0].torch_device
                self._rates[index] = torch.empty((), dtype=torch.float32, device=device)
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                self._rates[index].copy_(rate.reshape(()))
            else:
                self._rates[index].fill_(rate)

    def baked_hyperparameters(self) -> tuple[tuple[Any, ...], ...]:
        """The hyperparameters of each group that a captured update has as constants: all except the learning rate."""
        known = [name for name in self.user_optimizer.defaults if name != "lr"]
        return tuple(tuple(group[name] for name in known) for group in self.user_optimizer.param_groups)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Marks the flat optimizers as capturable during a capture, as torch's Adam requires; fused implementations are.

        The mark is removed afterwards, because torch warns of it outside of captures.
        """
        groups = [own.optimizer.param_groups[0] for own in self._flat.values()]
        groups = [group for group in groups if "capturable" in group]
        for group in groups:
            group["capturable"] = True
        try:
            yield
        finally:
            for group in groups:
                group["capturable"] = False

    def updater(self, bucket: int, replica: int) -> Callable[[torch.Tensor], None]:
        """The function that applies a reduced bucket of gradients on a replica."""
        return self._flat[(bucket, replica)].update

    def finish_step(self) -> None:
        """Shows the new state in the user's optimizer."""
        if self._entries != self._present_entries():  # an optimizer makes its state in its first step
            self._publish()
            return_freed_memory()  # the parts of the state have been copied together
        for shown, value in self._scalars:
            shown.copy_(value)
        self._versions = self._present_versions()

    def _present_entries(self) -> list[int]:
        return [id(value) for flat in self._elementwise() for value in self._first(flat.bucket).state.values()]

    def _publish(self) -> None:
        self._scalars.clear()
        self._shown.clear()
        for flat in self._elementwise():
            self._publish_bucket(flat.bucket)
        self._entries = self._present_entries()
        self._versions = self._present_versions()

    def _publish_bucket(self, bucket: Bucket) -> None:
        """Puts views of replica 0's flat state into the user's optimizer."""
        self._hold_what_is_new(bucket)
        own = self._first(bucket).state
        entries: dict[str, Sequence[Any]] = {}
        for key, value in own.items():
            if value is None:
                entries[key] = [None] * len(bucket.slots)
            elif key in SCALAR_STATE:
                shown = value.detach().expand(len(bucket.slots)).clone()
                self._scalars.append((shown, value))
                entries[key] = list(shown.unbind())
            else:
                entries[key] = slot_views(self._whole[bucket.index][key], bucket)
        state = self.user_optimizer.state
        for i, slot in enumerate(bucket.slots):
            parameter = self._parameter(slot.variable)
            if own or parameter in state:
                state[parameter] = {key: values[i] for key, values in entries.items()}
            self._shown.append((parameter, state.get(parameter)))

    def _hold_what_is_new(self, bucket: Bucket) -> None:
        """Joins the state that the flat optimizers have made in their first step: one tensor for each entry of a bucket."""
        held, replicas = self._whole.setdefault(bucket.index, {}), self._replicas(bucket)
        for key, value in list(self._first(bucket).state.items()):
            is_held = key in held and value.data_ptr() == held[key].data_ptr()
            if value is None or key in SCALAR_STATE or is_held:
                continue
            if bucket.reduces_by_shares:
                self._hold(bucket, key, torch.cat([own.state[key] for own in replicas.values()]))
            else:
                held[key] = value

    def update_memory(self, bucket: Bucket) -> UpdateMemory:
        """The memory that the update of an element-wise bucket needs; the bucket need not be laid out yet."""
        device, state = self._parameter(bucket.slots[0].variable).device, self._user_states(bucket)[0]
        return update_memory(self.user_optimizer, bucket.rule.group, bucket.dtype, device, state)

    def own_state_bytes(self, buckets: Sequence[Bucket]) -> int | None:
        """Bytes of state for these buckets in an optimizer that runs by itself; None before its first step makes the state."""
        states = [state for bucket in buckets for state in self._user_states(bucket)]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        if not tensors and not self._has_run_by_itself:
            return None
        return sum({storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())

    def step_by_itself(self, buckets: Sequence[int], *gradients: torch.Tensor) -> None:
        """Runs the user's optimizer on replica 0's parameters, as a training loop would."""
        self.user_optimizer.zero_grad(set_to_none=True)
        members: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        for index, gradient in zip(buckets, gradients, strict=True):
            flat = self._store.buckets[index]
            homes = slot_views(flat.parameters[0], flat.bucket)
            for slot, home, view in zip(flat.bucket.slots, homes, slot_views(gradient, flat.bucket), strict=True):
                parameter = self._parameter(slot.variable)
                parameter.grad = view
                members.append((parameter, home))
        try:
            self.user_optimizer.step()
            self._has_run_by_itself = True
        finally:
            for parameter, home in members:
                parameter.grad = None
                if parameter.data_ptr() != home.data_ptr():  # an optimizer may replace a parameter's tensor
                    home.copy_(parameter.detach())
                    parameter.data = home
