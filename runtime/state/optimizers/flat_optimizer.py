"""The user's optimizer over flat memory, also with optional parameters."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.torch_internals import bare_step, dividing_gradients, peak_allocation, takes_divisor
from mirrorc.user.optimizer_kinds import SCALAR_STATE, flat_entries, is_fused

_TRIED_ELEMENTS = 4096  # enough that tensors of one element are negligible


@dataclass(frozen=True)
class UpdateMemory:
    """Memory of an element-wise update, other than parameters and gradients.

    Attributes:
        state: entry -> dtype, for tensors of bucket length.
        scalars: entry -> dtype, for scalars.
        temporary_bytes: per element.
    """

    state: Mapping[str, torch.dtype]
    scalars: Mapping[str, torch.dtype]
    temporary_bytes: float


class FlatOptimizer:
    """An optimizer of the user's class. Its single parameter is a replica's bucket, or a shard of it."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: int, flat: torch.Tensor, rate: torch.Tensor | None = None
    ) -> None:
        self.parameter = torch.nn.Parameter(flat)
        self.parameter.requires_grad_(True)
        self._source = optimizer
        self._group = group
        self._rate = rate
        self.optimizer = object.__new__(type(optimizer))
        state = {
            "defaults": dict(optimizer.defaults),
            "state": defaultdict(dict),
            "param_groups": [self._hyperparameters()],
        }
        self.optimizer.__setstate__(state)  # as unpickling does; this is how the class starts from a given state
        self._step = bare_step(type(optimizer))
        self._of_parts: PartOptimizer | None = None

    def _hyperparameters(self) -> dict[str, Any]:
        group = {**self._source.param_groups[self._group], "params": [self.parameter]}
        if group.get("fused", False) is None and not group.get("foreach"):
            group["fused"] = is_fused(type(self._source), group, self.parameter.dtype, self.parameter.device.type)
        if self._rate is not None:
            group["lr"] = self._rate
        return group

    def sync(self) -> None:
        self.optimizer.param_groups[0].update(self._hyperparameters())
        if self._of_parts is not None:
            self._of_parts.sync()

    @property
    def of_parts(self) -> PartOptimizer:
        if self._of_parts is None:
            self._of_parts = PartOptimizer(self)
        return self._of_parts

    @property
    def state(self) -> dict[str, Any]:
        return self.optimizer.state[self.parameter]

    def make_state(self) -> None:
        """Creates the state that the class creates in its constructor, such as Adagrad's in torch 2.11."""
        kind = type(self._source)
        taken = inspect.signature(kind).parameters
        options = self.optimizer.param_groups[0].items()
        group = {key: value for key, value in options if key in taken and key != "params"}
        made = kind([self.parameter], **group).state
        if self.parameter in made:
            self.optimizer.state[self.parameter] = made[self.parameter]

    @property
    def divides_gradients(self) -> bool:
        is_fused = bool(self.optimizer.param_groups[0].get("fused"))
        return is_fused and self.parameter.dtype == torch.float32 and takes_divisor(type(self.optimizer))

    def update(self, gradient: torch.Tensor, divisor: float | None = None) -> None:
        """Runs a step on ``gradient``, or on ``gradient / divisor``: the fused kernel divides, possibly in place."""
        self.parameter.grad = gradient
        if divisor is None:
            self._step(self.optimizer)
        else:
            with dividing_gradients(self.optimizer, divisor):
                self._step(self.optimizer)


class PartOptimizer:
    """Runs a step of a flat optimizer in parts. Each part has a copy of the step count, and its range of the state."""

    def __init__(self, whole: FlatOptimizer) -> None:
        self._whole = whole
        self._part = FlatOptimizer(whole._source, whole._group, whole.parameter.detach()[:0], whole._rate)
        self._views: dict[tuple[int, int], tuple[torch.Tensor, dict[str, Any]]] = {}  # of parameters and state, by part
        self._viewed: dict[str, int] = {}  # the addresses under the views

    def sync(self) -> None:
        self._part.sync()

    def update(self, parts: Callable[[Callable[[int, torch.Tensor], None]], None]) -> None:
        """Runs one step. ``parts`` calls its argument with the first element and the 1-D tensor of each part, in order."""
        whole = self._whole.state
        numbers = {key: value for key, value in whole.items() if key in SCALAR_STATE}
        made: list[dict[str, Any]] = []
        self._note_addresses(whole)
        parts(lambda first, gradient: made.append(self._step(first, gradient, numbers)))
        self._part.parameter.grad = None
        for key, value in made[-1].items():
            if key in SCALAR_STATE and isinstance(whole.get(key), torch.Tensor):
                whole[key].copy_(value)
            elif key in SCALAR_STATE:
                whole[key] = value
            elif not isinstance(whole.get(key), torch.Tensor):  # the optimizer makes it in its first step
                is_tensor = isinstance(value, torch.Tensor)
                whole[key] = torch.cat([state[key] for state in made]) if is_tensor else value

    def update_ranges(
        self,
        gradient: torch.Tensor,
        ranges: Sequence[tuple[int, int]],
        numbers: Mapping[str, torch.Tensor] | None,
        divisor: float | None = None,
    ) -> dict[str, torch.Tensor]:
        """Runs a step on elements with equal step counts; returns the new scalars of the state.

        Args:
            ranges: start and stop of each range. Without ranges, only the scalars advance.
            numbers: scalars of the state; None if this step creates the state.
        """
        self._note_addresses(self._whole.state)
        state: dict[str, Any] = {}
        for start, stop in ranges or [(0, 0)]:
            state = self._step(start, gradient[start:stop], numbers, divisor)
            if numbers is None:
                self._keep_made(start, stop, state)
        self._part.parameter.grad = None
        return {key: value for key, value in state.items() if key in SCALAR_STATE}

    def _step(
        self, first: int, gradient: torch.Tensor, numbers: Mapping[str, Any] | None, divisor: float | None = None
    ) -> dict[str, Any]:
        part, (parameters, state) = self._part, self._view(first, len(gradient))
        part.parameter.data = parameters
        now = {**state, **{key: _copy(value) for key, value in numbers.items()}} if numbers is not None else {}
        part.optimizer.state[part.parameter] = now
        part.update(gradient, divisor)
        return part.state

    def _keep_made(self, start: int, stop: int, made: Mapping[str, Any]) -> None:
        """Stores the state of a range's first update. Elements that were not updated have zeros."""
        whole = self._whole.state
        for key, value in made.items():
            if key in SCALAR_STATE or not isinstance(value, torch.Tensor):
                whole.setdefault(key, _copy(value))
                continue
            if whole.get(key) is None:
                whole[key] = value.new_zeros(len(self._whole.parameter))
            whole[key][start:stop] = value

    def _note_addresses(self, state: Mapping[str, Any]) -> None:
        addresses = {key: value.data_ptr() for key, value in state.items() if isinstance(value, torch.Tensor)}
        if addresses != self._viewed:
            self._viewed = addresses
            self._views.clear()

    def _view(self, first: int, length: int) -> tuple[torch.Tensor, dict[str, Any]]:
        if (first, length) not in self._views:
            part = slice(first, first + length)
            entries = {
                key: value[part] if isinstance(value, torch.Tensor) else value
                for key, value in self._whole.state.items()
                if key not in SCALAR_STATE
            }
            self._views[(first, length)] = self._whole.parameter.detach()[part], entries
        return self._views[(first, length)]


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def update_memory(
    optimizer: torch.optim.Optimizer, group: int, dtype: torch.dtype, device: torch.device, known: Mapping[str, Any]
) -> UpdateMemory:
    """Measures an element-wise update with a copy of the optimizer on a few elements."""
    flat, gradient = (torch.zeros(_TRIED_ELEMENTS, dtype=dtype, device=device) for _ in range(2))
    tried = FlatOptimizer(optimizer, group, flat)
    tried.make_state()
    with torch.no_grad():
        tried.update(gradient)  # makes its state
        made = [value for value in tried.state.values() if isinstance(value, torch.Tensor)]
        peak = peak_allocation(lambda: tried.update(gradient), [flat, gradient, *made])
    state = known or tried.state
    entries = {key: value.dtype for key, value in state.items() if isinstance(value, torch.Tensor)}
    return UpdateMemory(
        state={key: dtype for key, dtype in entries.items() if key not in SCALAR_STATE},
        scalars={key: dtype for key, dtype in entries.items() if key in SCALAR_STATE},
        temporary_bytes=peak / _TRIED_ELEMENTS,
    )


class SlotOptimizer:
    """A flat optimizer over parameters with different step counts.

    While all counts are equal, an update is one flat step. Otherwise parameters with equal counts are updated together,
    in ranges of adjacent elements.

    Args:
        elements: start and stop of the updated elements in the bucket.

    Attributes:
        numbers: scalar state entries, one value per slot, 1-D.
        made: for each slot, True if its parameter has state.
    """

    def __init__(self, whole: FlatOptimizer, bucket: Bucket, elements: tuple[int, int]) -> None:
        self._whole, self._bucket = whole, bucket
        self._start, self._stop = elements
        self.numbers: dict[str, torch.Tensor] = {}
        self.made = [False] * len(bucket.slots)
        self._are_alike = True

    def take_over(self, states: Sequence[Mapping[str, Any]]) -> None:
        known = [flat_entries(state) for state in states]
        self.made = [bool(state) for state in known]
        for key, like in self._whole.state.items():
            if key in SCALAR_STATE:
                row = [torch.as_tensor(state.get(key, 0.0)).detach().reshape(()).to(like) for state in known]
                self.numbers[key] = torch.stack(row)
        self._compare()

    def go_on_from(self, earlier: SlotOptimizer) -> None:
        self.made = list(earlier.made)
        self.numbers = {key: row.to(self._whole.state[key].device, copy=True) for key, row in earlier.numbers.items()}
        self._compare()

    @property
    def divides_gradients(self) -> bool:
        return self._whole.divides_gradients

    def update(self, gradient: torch.Tensor, unused: Collection[int], divisor: float | None = None) -> None:
        if self._are_alike and not unused:
            self._update_all(gradient, divisor)
            return
        alike: dict[tuple[float, ...] | None, list[int]] = {}  # by their numbers; None without state
        rows = [row.tolist() for row in self.numbers.values()]
        for place, is_made in enumerate(self.made):
            if place not in unused:
                numbers = tuple(row[place] for row in rows) if is_made else None
                alike.setdefault(numbers, []).append(place)
        for numbers, places in alike.items():
            before = {key: row[places[0]] for key, row in self.numbers.items()} if numbers is not None else None
            after = self._whole.of_parts.update_ranges(gradient, self._ranges(places), before, divisor)
            for key, value in after.items():
                if key not in self.numbers:
                    self.numbers[key] = value.new_zeros(len(self.made))
                self.numbers[key][places] = value
            for place in places:
                self.made[place] = bool(flat_entries(self._whole.state))
        self._compare()

    def _update_all(self, gradient: torch.Tensor, divisor: float | None) -> None:
        self._whole.update(gradient, divisor)
        state = flat_entries(self._whole.state)
        if state and not self.made[0]:
            self.made = [True] * len(self.made)
        for key in SCALAR_STATE:
            if key in state:
                if key not in self.numbers:
                    self.numbers[key] = state[key].new_zeros(len(self.made))
                self.numbers[key].fill_(state[key])

    def _ranges(self, places: Sequence[int]) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        following = None
        for place in places:
            slot = self._bucket.slots[place]
            start = max(slot.offset, self._start) - self._start
            stop = min(slot.offset + slot.num_elements, self._stop) - self._start
            if start >= stop:
                continue
            if place == following and ranges:
                start = ranges.pop()[0]  # gaps between slots are zero and stay so
            ranges.append((start, stop))
            following = place + 1
        return ranges

    def _compare(self) -> None:
        rows = {key: row.tolist() for key, row in self.numbers.items()}
        self._are_alike = len(set(self.made)) == 1 and all(len(set(row)) == 1 for row in rows.values())
        if self._are_alike and self.made[0]:
            for key, row in self.numbers.items():
                self._whole.state[key].copy_(row[0])
