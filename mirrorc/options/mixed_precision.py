"""The option ``autocast``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mirrorc.ir.devices import Device
from mirrorc.messages.problem import problem

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def checked_autocast(autocast: Any, devices: Sequence[Device]) -> torch.dtype | None:
    """The dtype of autocast in forward and loss; None for the caller's autocast.

    Raises:
        TypeError, ValueError: the value is not bfloat16, float16, one of their names, True, False or None.
    """
    if autocast is None or autocast is False:
        return None
    if autocast is True:
        return torch.get_autocast_dtype(devices[0].torch_device.type)
    dtype = _DTYPES.get(autocast) if isinstance(autocast, str) else autocast
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    kind = ValueError if isinstance(autocast, str | torch.dtype) else TypeError
    fix = "give torch.bfloat16 or torch.float16, True for what torch takes on these devices, or None"
    raise problem(kind, f"MC1002: autocast is {autocast!r}", fix=fix)
