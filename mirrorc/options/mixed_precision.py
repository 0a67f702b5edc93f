"""The options of a step for computing with 16 bits: a scaler of the loss, and autocast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mirrorc.ir.devices import Device
from mirrorc.runtime.state.optimizers.loss_scale import is_in_use

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def checked_scaler(scaler: Any, options: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> Any:
    """The scaler of the loss; None if it is not enabled.

    Args:
        scaler: the option.
        options: the arguments of `mirrorc.compile`, by name.
        parameters: of the model, by name.

    Raises:
        TypeError: it is no `torch.amp.GradScaler`.
        ValueError: another step has it, or it contradicts another option, or cannot be used with a parameter; names it and the
            remedy.
    """
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler is {scaler!r}: give a torch.amp.GradScaler, or None")
    if not scaler.is_enabled():
        return None
    if is_in_use(scaler):
        raise ValueError(
            "scaler= is the GradScaler of another step, and each step counts and changes its scale as scaler.update() does, "
            "which a loop over several optimizers calls once: give each step a GradScaler of its own, close() the other step, or "
            "train both optimizers in one step, optimizer=[first, second]"
        )
    if options["check_finite"]:
        raise ValueError(
            f"scaler= skips each step whose gradients are not finite, and check_finite={options['check_finite']!r} says what "
            "happens to such a step, too: leave out one of them"
        )
    if options["cuda_graphs"]:
        raise ValueError(
            "scaler= cannot be used with cuda_graphs=True: the host looks at what is finite in every step, and a graph runs "
            "without it; leave out one of them"
        )
    if options["passes"] is not None:
        raise ValueError(
            "scaler= has no part in a pipeline given with passes=: leave passes out, and use add_passes and disable_passes"
        )
    needed = [name for name in ("unscale-gradients", "check-finite") if name in options["disable_passes"]]
    if needed:
        raise ValueError(
            f"scaler= asks for the pass {needed[0]!r}, which disable_passes leaves out: leave out one of them"
        )
    halves = [name for name, own in parameters.items() if own.requires_grad and own.dtype == torch.float16]
    if halves:
        raise ValueError(
            f"scaler= divides gradients by the scale, for which 16 bits are too few, but the parameter {halves[0]!r} is float16: "
            "keep parameters in float32 and compute in float16 by autocast=torch.float16 (torch's GradScaler refuses them, too)"
        )
    return scaler


def checked_autocast(autocast: Any, devices: Sequence[Device]) -> torch.dtype | None:
    """The dtype of autocast in forward and loss; None for no autocast of the step's own.

    Raises:
        TypeError, ValueError: it is neither a dtype that autocast takes nor its name, True, False or None.
    """
    if autocast is None or autocast is False:
        return None
    if autocast is True:
        return torch.get_autocast_dtype(devices[0].torch_device.type)
    found = _DTYPES.get(autocast) if isinstance(autocast, str) else autocast
    if isinstance(found, torch.dtype) and found in _DTYPES.values():
        return found
    kind = ValueError if isinstance(autocast, str | torch.dtype) else TypeError
    raise kind(
        f"autocast is {autocast!r}: give torch.bfloat16 or torch.float16, True for what torch takes on these devices, or None"
    )
