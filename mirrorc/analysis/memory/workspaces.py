"""Estimates large workspaces from an operator's arguments."""

from __future__ import annotations

import math
from typing import Any

import torch

aten = torch.ops.aten
_UNBLOCKED_CHANNELS = 4  # images of so few channels are not copied


def workspace_bytes(operator: Any, args: tuple[Any, ...], result: Any) -> int:
    """An operator's peak workspace, without its result; 0 for unknown operators. Tensors may be fake."""
    if operator is aten.convolution.default:
        image, weight = args[:2]
        return max(0, _forward(image, weight, result)) if _is_blocked(image, weight) else 0
    if operator is aten.convolution_backward.default:
        gradient, image, weight = args[:3]
        is_strided = any(step > 1 for step in args[4])
        return max(0, _backward(gradient, image, weight, result, is_strided)) if _is_blocked(image, weight) else 0
    return 0


def _is_blocked(image: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if oneDNN copies a convolution's operands into a blocked format.

    It does so for float32 on the CPU, except in channels-last format (oneDNN's manual, "Understanding memory formats").
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_last = any(
        t.dim() in formats and not t.is_contiguous() and t.is_contiguous(memory_format=formats[t.dim()])
        for t in (image, weight)
    )
    is_fast = torch.backends.mkldnn.is_available() and image.dtype is torch.float32
    return image.device.type == "cpu" and is_fast and not is_last


def _block() -> int:
    return 16 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 8


def _blocked(image: torch.Tensor) -> int:
    channels = image.shape[1]
    return image.nbytes // max(1, channels) * math.ceil(channels / _block()) * _block()


def _blocked_weight(weight: torch.Tensor) -> int:
    return _blocked(weight.transpose(0, 1) if weight.shape[1] <= _UNBLOCKED_CHANNELS else weight)


def _forward(image: torch.Tensor, weight: torch.Tensor, result: torch.Tensor) -> int:
    """Bytes of all operands in blocked format, or of the result in both formats if these are more."""
    copied = _blocked(image) if image.shape[1] > _UNBLOCKED_CHANNELS else 0
    return max(copied + _blocked_weight(weight) + _blocked(result) - result.nbytes, _blocked(result))


def _backward(gradient: torch.Tensor, image: torch.Tensor, weight: torch.Tensor, result: Any, is_strided: bool) -> int:
    """Bytes for the image's gradient, which may be None, or for the weight's gradient if these are more.

    The image's gradient is computed first, so it is held during the second computation.
    """
    result_bytes = sum(part.nbytes for part in result if part is not None)
    copied = _blocked(image) if image.shape[1] >= _UNBLOCKED_CHANNELS else 0
    of_weight = _blocked(gradient) + copied + _blocked_weight(weight)
    if result[0] is None:
        return of_weight - result_bytes
    of_image = _blocked(gradient) + _blocked_weight(weight) + _blocked(image)
    if is_strided:  # the gradient is written twice (seen in torch 2.13)
        of_image = max(of_image, _blocked(image) + 2 * result[0].nbytes)
    return max(of_image, of_weight + result[0].nbytes) - result_bytes
