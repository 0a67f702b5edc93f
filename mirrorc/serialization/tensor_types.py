"""Describes the fake tensors that are the values of nodes, so that they can be saved."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mirrorc.serialization.plain_data import DataError
from mirrorc.torch_internals import FakeTensor, FakeTensorMode, lazily_negative


@dataclass(frozen=True)
class TensorType:
    """The properties of a fake tensor that are saved.

    Attributes:
        dtype: its dtype.
        device: the device that it stands for.
        shape: its shape.
        strides: its strides.
        offset: the offset of its first element in its memory, counted in elements.
        is_conjugated: whether it is a lazy conjugate, ``tensor.is_conj()``.
        is_negated: whether it is a lazy negative, ``tensor.is_neg()``.
    """

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_conjugated: bool
    is_negated: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorType:
        """The type of a fake tensor."""
        if tensor.layout is not torch.strided:
            raise DataError(f"its value has the layout {tensor.layout}, and only strided tensors can be saved")
        shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        if not isinstance(offset, int) or any(type(number) is not int for number in (*shape, *strides)):
            raise DataError(f"its value has the symbolic shape {shape}, and only fixed shapes can be saved")
        return cls(tensor.dtype, tensor.device, shape, strides, offset, tensor.is_conj(), tensor.is_neg())

    def make(self, fake_mode: FakeTensorMode) -> FakeTensor:
        """Makes a fake tensor of this type, in memory of its own. It bypasses the mode's dispatcher, which is five times as slow.

        Raises:
            Exception: torch has no such tensors; the exception is torch's.
        """
        if self.offset:
            extent = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + 1
            memory = torch.empty(self.offset + max(extent, 0), dtype=self.dtype, device="meta")
            tensor = memory.as_strided(self.shape, self.strides, self.offset)
        else:
            tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        tensor = tensor.conj() if self.is_conjugated else tensor
        tensor = lazily_negative(tensor) if self.is_negated else tensor
        return FakeTensor(fake_mode, tensor, self.device)
