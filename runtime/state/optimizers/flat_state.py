"""State of element-wise optimizers in flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.runtime.state.optimizers.flat_optimizer import FlatOptimizer, SlotOptimizer
from mirrorc.runtime.state.optimizers.user_optimizers import DealtState, ShownNumbers
from mirrorc.runtime.state.variables.layout import FlatBucket, slot_views
from mirrorc.user.optimizer_kinds import SCALAR_STATE, flat_entries

UserState = Mapping[str, Any]


@dataclass
class Shown:
    """Views of flat state for the user, prepared so that the switch is atomic.

    Attributes:
        states: new entries by parameter name; None for no change.
    """

    states: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    numbers: ShownNumbers = field(default_factory=lambda: ShownNumbers([]))


class FlatState:
    def __init__(
        self,
        buckets: Sequence[FlatBucket],
        make: Callable[[Bucket, torch.Tensor], FlatOptimizer],
        states_of: Callable[[Bucket], Sequence[UserState]],
        earlier: FlatState | None = None,
    ) -> None:
        self.buckets = buckets
        self.optimizers: dict[tuple[int, int], FlatOptimizer] = {}
        self.by_slot: dict[tuple[int, int], SlotOptimizer] = {}
        self.whole: dict[int, dict[str, torch.Tensor]] = {}
        for flat in buckets:
            for replica, parameters in enumerate(flat.parameters):
                start, stop = flat.bucket.updated(replica, len(flat.parameters))
                if start < stop:
                    key = flat.bucket.index, replica
                    optimizer = self.optimizers[key] = make(flat.bucket, parameters[start:stop])
                    if flat.bucket.rule.may_be_unused:
                        self.by_slot[key] = SlotOptimizer(optimizer, flat.bucket, (start, stop))
            if earlier is None:
                self._take_over(flat, states_of(flat.bucket))
            else:
                self._go_on_from(flat, earlier)

    def _replicas(self, flat: FlatBucket) -> dict[int, FlatOptimizer]:
        index, replicas = flat.bucket.index, range(len(flat.parameters))
        return {r: self.optimizers[index, r] for r in replicas if (index, r) in self.optimizers}

    def _first(self, flat: FlatBucket) -> FlatOptimizer:
        return next(iter(self._replicas(flat).values()))

    def _slots_of(self, flat: FlatBucket) -> list[SlotOptimizer]:
        index = flat.bucket.index
        return [self.by_slot[index, r] for r in self._replicas(flat) if (index, r) in self.by_slot]

    def _take_over(self, flat: FlatBucket, states: Sequence[UserState]) -> None:
        bucket, home = flat.bucket, self._first(flat).parameter.device
        known = [flat_entries(state) for state in states]
        for key, first in next(filter(None, known), {}).items():
            if key in SCALAR_STATE:
                value = torch.as_tensor(first).detach().reshape(())
                value = value if value.is_floating_point() else value.to(torch.float32)  # as fused kernels want counts
                self._hold_number(flat, key, value)
                continue
            whole = torch.zeros(bucket.num_elements, dtype=first.dtype, device=home)
            for view, state in zip(slot_views(whole, bucket), known, strict=True):
                if key in state:  # otherwise not updated yet
                    view.copy_(state[key])
            if bucket.part is not None:
                whole = whole[bucket.part.start : bucket.part.stop].clone()
            self._hold(flat, key, whole)
        for optimizer in self._slots_of(flat):
            optimizer.take_over(states)

    def _go_on_from(self, flat: FlatBucket, earlier: FlatState) -> None:
        for key, value in earlier._first(flat).state.items():
            if key in SCALAR_STATE:
                self._hold_number(flat, key, value)
            elif value is not None:
                self._hold(flat, key, earlier.whole[flat.bucket.index][key])
        for optimizer in self._slots_of(flat):
            optimizer.go_on_from(earlier._slots_of(flat)[0])

    def _hold_number(self, flat: FlatBucket, key: str, value: torch.Tensor) -> None:
        for optimizer in self._replicas(flat).values():
            is_fused = optimizer.optimizer.param_groups[0].get("fused")
            optimizer.state[key] = value.to(optimizer.parameter.device if is_fused else value.device, copy=True)

    def _hold(self, flat: FlatBucket, key: str, whole: torch.Tensor) -> None:
        """Replicas with the first updating replica's parameters get views of ranges, others copies of ``whole``."""
        first = flat.bucket.part.start if flat.bucket.part is not None else 0
        replicas = self._replicas(flat)
        home = flat.bucket.owner_of_parameters(next(iter(replicas)))
        for replica, optimizer in replicas.items():
            start, stop = (place - first for place in flat.bucket.updated(replica, len(flat.parameters)))
            is_view = flat.bucket.owner_of_parameters(replica) == home
            optimizer.state[key] = whole[start:stop] if is_view else whole.to(optimizer.parameter.device, copy=True)
        self.whole.setdefault(flat.bucket.index, {})[key] = whole

    def copies(self) -> Iterator[tuple[Bucket, str, list[torch.Tensor]]]:
        for flat in self.buckets:
            if not flat.bucket.placement.value.updates_by_shares:
                states = [optimizer.state for optimizer in self._replicas(flat).values()]
                for key, value in states[0].items():
                    if isinstance(value, torch.Tensor):
                        yield flat.bucket, key, [state[key] for state in states]

    def hold_new_state(self) -> None:
        for flat in self.buckets:
            held, replicas = self.whole.setdefault(flat.bucket.index, {}), self._replicas(flat)
            for key, value in list(self._first(flat).state.items()):
                is_held = key in held and value.data_ptr() == held[key].data_ptr()
                if value is None or key in SCALAR_STATE or is_held:
                    continue
                if flat.bucket.updates_by_shares:
                    self._hold(flat, key, torch.cat([optimizer.state[key] for optimizer in replicas.values()]))
                else:
                    held[key] = value

    @property
    def is_complete(self) -> bool:
        return all(self._first(flat).state for flat in self.buckets)

    def entries(self) -> list[int]:
        """Ids of the state entries, and counts of slots with state. New state changes the list."""
        made = [sum(slots.made) for slots in self.by_slot.values()]
        return [*made, *(id(value) for flat in self.buckets for value in self._first(flat).state.values())]

    def parts(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """This worker's parts of sharded state, as (bucket, entry, part), in the same order on all workers."""
        for flat in self.buckets:
            if flat.bucket.part is not None:
                for key in sorted(self.whole.get(flat.bucket.index, {})):
                    yield flat.bucket.index, key, self.whole[flat.bucket.index][key]

    def shown(self, gathered: Mapping[tuple[int, str], torch.Tensor] | None = None) -> Shown:
        """Views of replica 0's state, for the user's optimizer.

        Args:
            gathered: whole tensors of all `parts`; without them, `DealtState` takes their place.
        """
        by_slot = {flat.bucket.index: slots[0] for flat in self.buckets if (slots := self._slots_of(flat))}
        numbers = {
            (flat.bucket.index, key): (self._number(flat, key), len(flat.bucket.slots))
            for flat in self.buckets
            for key, value in self._first(flat).state.items()
            if value is not None and key in SCALAR_STATE
        }
        result = Shown(numbers=ShownNumbers(list(numbers.values())))
        shown = dict(zip(numbers, result.numbers.shown, strict=True))
        for flat in self.buckets:
            present, bucket = self._first(flat).state, flat.bucket
            entries: dict[str, Sequence[Any]] = {}
            for key, value in present.items():
                if value is None:
                    entries[key] = [None] * len(bucket.slots)
                elif key in SCALAR_STATE:
                    entries[key] = shown[bucket.index, key].unbind()
                elif bucket.part is not None and gathered:
                    entries[key] = slot_views(gathered[bucket.index, key], bucket)
                elif bucket.part is not None:
                    entries[key] = [DealtState(value.dtype)] * len(bucket.slots)
                else:
                    entries[key] = slot_views(self.whole[bucket.index][key], bucket)
            for i, slot in enumerate(bucket.slots):
                state = {key: values[i] for key, values in entries.items()}
                is_there = present and (bucket.index not in by_slot or by_slot[bucket.index].made[i])
                result.states[slot.variable] = state if is_there else None
        return result

    def _number(self, flat: FlatBucket, key: str) -> torch.Tensor:
        by_slot = self._slots_of(flat)
        return by_slot[0].numbers[key] if by_slot else self._first(flat).state[key]


@dataclass(frozen=True)
class Laid:
    state: FlatState
    shown: Shown
    gathered: Mapping[tuple[int, str], torch.Tensor] | None = None
