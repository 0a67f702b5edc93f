"""Updates of buckets with optional parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from mirrorc.ir.buckets import Bucket
from mirrorc.runtime.state.optimizers.flat_optimizer import FlatOptimizer
from mirrorc.user.optimizer_kinds import SCALAR_STATE, flat_entries


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
        if divisor is None:
            self._whole.update(gradient)
        else:
            self._whole.update_divided(gradient, divisor)
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
