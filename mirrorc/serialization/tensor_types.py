"""Converts fake tensors to records and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mirrorc.serialization.plain_data import DataError
from mirrorc.torch_internals import FakeTensor, FakeTensorMode, SavedSizes, has_symbols, lazily_negative, size_now


@dataclass(frozen=True)
class TensorType:
    """The saved properties of a fake tensor.

    Attributes:
        offset: of the first element in the storage, in elements.
        is_conjugated, is_negated: ``tensor.is_conj()`` and ``tensor.is_neg()``, which are lazy.
        symbols: the index of the shape environment's symbols; None without symbols.
        sizes: the symbolic shape, strides and offset as texts; empty without symbols. Other fields have numbers at capture.
    """

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    is_conjugated: bool
    is_negated: bool
    symbols: int | None = None
    sizes: tuple[str, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, symbols: int | None = None, saved: SavedSizes | None = None) -> TensorType:
        """``symbols`` and ``saved`` are the index and writer of the tensor's environment."""
        if tensor.layout is not torch.strided:
            raise DataError(f"its value has the layout {tensor.layout}, and only strided tensors can be saved")
        extents = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        texts: tuple[str, ...] = ()
        if has_symbols(tensor):
            try:
                texts = tuple(saved.text(size) for size in extents) if saved is not None else ()
            except ValueError as error:
                raise DataError(f"its value has the symbolic shape {tuple(tensor.shape)}: {error}") from error
        numbers = tuple(map(size_now, extents))
        if any(type(number) is not int for number in numbers) or (has_symbols(tensor) and not texts):
            raise DataError(f"its value has the symbolic shape {tuple(tensor.shape)}, of sizes that follow from values")
        rank = tensor.dim()
        layout = (numbers[:rank], numbers[rank:-1], numbers[-1])
        return cls(tensor.dtype, tensor.device, *layout, tensor.is_conj(), tensor.is_neg(), symbols, texts)

    def make(self, fake_mode: FakeTensorMode, saved: SavedSizes | None = None) -> torch.Tensor:
        """Makes a fake tensor with its own storage. Without symbols, bypasses the fake mode's slow dispatcher."""
        if self.sizes:
            return self._made_of_symbols(saved)
        if self.offset:
            extent = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + 1
            memory = torch.empty(self.offset + max(extent, 0), dtype=self.dtype, device="meta")
            tensor = memory.as_strided(self.shape, self.strides, self.offset)
        else:
            tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        tensor = tensor.conj() if self.is_conjugated else tensor
        tensor = lazily_negative(tensor) if self.is_negated else tensor
        return FakeTensor(fake_mode, tensor, self.device)

    def _made_of_symbols(self, saved: SavedSizes | None) -> torch.Tensor:
        rank = len(self.shape)
        if saved is None or len(self.sizes) != 2 * rank + 1:
            raise ValueError("it has symbols of no environment")
        *sizes, offset = map(saved.size, self.sizes)
        shape, strides = sizes[:rank], sizes[rank:]
        with saved.fake_mode:
            if type(offset) is int and not offset:
                tensor = torch.empty_strided(shape, strides, dtype=self.dtype, device=self.device)
            else:
                extent = sum(((size - 1) * stride for size, stride in zip(shape, strides, strict=True)), start=1)
                memory = torch.empty(offset + extent, dtype=self.dtype, device=self.device)
                tensor = memory.as_strided(shape, strides, offset)
            tensor = tensor.conj() if self.is_conjugated else tensor
            return lazily_negative(tensor) if self.is_negated else tensor
