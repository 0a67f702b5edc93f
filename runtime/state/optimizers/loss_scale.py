"""Loss scaling with the user's `torch.amp.GradScaler`."""

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
    if _owner_of(scaler) is not None:
        gc.collect()  # an unreachable step may be in a reference cycle
    return _owner_of(scaler) is not None


def _owner_of(scaler: torch.amp.GradScaler) -> LossScale | None:
    owner = _IN_USE.get(scaler)
    return owner() if owner is not None else None


class LossScale:
    def __init__(self, scaler: torch.amp.GradScaler, devices: Sequence[Device]) -> None:
        self._scaler, self._devices = scaler, devices
        _IN_USE[scaler] = weakref.ref(self)
        scaler.scale(torch.zeros((), device=devices[0].torch_device))  # makes its state, so that users can change it
        self._before: dict[str, Any] = {}  # the scaler's state at the beginning of the step
        self._scale = math.nan
        self._tensors: list[torch.Tensor] = []

    def begin(self) -> float:
        self._before = self._scaler.state_dict()
        if self._before["scale"] != self._scale:
            self._scale = self._before["scale"]
            self._tensors = [
                torch.tensor(self._scale, dtype=torch.float32, device=device.torch_device) for device in self._devices
            ]
        return self._scale

    def close(self) -> None:
        if _owner_of(self._scaler) is self:
            del _IN_USE[self._scaler]

    def on(self, replica: int) -> torch.Tensor:
        return self._tensors[replica]

    def finish(self, *, has_overflowed: bool) -> None:
        state, scale = self._before, self._scale
        streak = state["_growth_tracker"] + 1
        if has_overflowed:
            scale, streak = scale * state["backoff_factor"], 0
        elif streak == state["growth_interval"]:
            grown = torch.tensor(scale * state["growth_factor"], dtype=torch.float32).item()
            scale, streak = grown if math.isfinite(grown) else scale, 0
        self._scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": streak})
