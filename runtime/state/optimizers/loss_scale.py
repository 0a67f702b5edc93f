"""The scale of the loss, which lives in the user's `torch.amp.GradScaler`."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from mirrorc.ir.devices import Device

_IN_USE: weakref.WeakKeyDictionary[torch.amp.GradScaler, weakref.ref[LossScale]] = weakref.WeakKeyDictionary()


def is_in_use(scaler: torch.amp.GradScaler) -> bool:
    """Whether a step has this scaler that is neither closed nor forgotten."""
    if _owner_of(scaler) is not None:
        gc.collect()  # a step that is forgotten may be in a circle of references
    return _owner_of(scaler) is not None


def _owner_of(scaler: torch.amp.GradScaler) -> LossScale | None:
    owner = _IN_USE.get(scaler)
    return owner() if owner is not None else None


class LossScale:
    """Takes the scale of each step from the user's scaler, and gives it the next one.

    The scaler is read and written by its ``state_dict`` and ``load_state_dict``, so it stays the user's: to save, to load, to
    look at. Its scale changes as in ``scaler.update()``. It is in use until `close`.

    Args:
        scaler: the user's, enabled.
        devices: the devices, in order of replicas.
    """

    def __init__(self, scaler: torch.amp.GradScaler, devices: Sequence[Device]) -> None:
        self._scaler, self._devices = scaler, devices
        _IN_USE[scaler] = weakref.ref(self)
        scaler.scale(
            torch.zeros((), device=devices[0].torch_device)
        )  # it makes its state then, so that users can change it
        self._before: dict[str, Any] = {}  # the scaler's state at the beginning of the step
        self._scale = math.nan
        self._tensors: list[torch.Tensor] = []

    def begin(self) -> float:
        """Called before a step; the scale of its loss, which the user may have changed since the last step."""
        self._before = self._scaler.state_dict()
        if self._before["scale"] != self._scale:
            self._scale = self._before["scale"]
            self._tensors = [
                torch.tensor(self._scale, dtype=torch.float32, device=device.torch_device) for device in self._devices
            ]
        return self._scale

    def close(self) -> None:
        """Lets another step have the scaler. May be repeated."""
        if _owner_of(self._scaler) is self:
            del _IN_USE[self._scaler]

    def on(self, replica: int) -> torch.Tensor:
        """The scale of the step as a scalar on a replica's device."""
        return self._tensors[replica]

    def finish(self, *, has_overflowed: bool) -> None:
        """Called when a step was made, or left out because a gradient was not finite. May be repeated from any point."""
        state, scale = self._before, self._scale
        streak = state["_growth_tracker"] + 1
        if has_overflowed:
            scale, streak = scale * state["backoff_factor"], 0
        elif streak == state["growth_interval"]:
            grown = torch.tensor(scale * state["growth_factor"], dtype=torch.float32).item()
            scale, streak = grown if math.isfinite(grown) else scale, 0
        self._scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": streak})
