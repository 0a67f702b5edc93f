"""What is traced in place of packed sequences: padded ones with their lengths, whose shapes do not depend on the lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mirrorc.custom_ops.sequence_lengths import checked_lengths


class PaddedSequences:
    """Stands for a PackedSequence in a trace. Recurrent modules take it as a tensor, whose dimensions they ask for.

    Args:
        values: [time, batch, ...], zeros behind the ends of sequences.
        lengths: [batch], checked.
    """

    def __init__(self, values: torch.Tensor, lengths: torch.Tensor) -> None:
        self.values, self.lengths = values, lengths
        self.dtype, self.device = values.dtype, values.device

    def dim(self) -> int:
        """The number of dimensions of the values."""
        return self.values.dim()

    def size(self, dim: int) -> int:
        """The number of sequences, whether they are thought of as first or second, or the number of features."""
        return self.values.size(1) if dim in (0, 1) else self.values.size(dim)

    def to(self, dtype: torch.dtype) -> PaddedSequences:
        """The same sequences in another type."""
        return PaddedSequences(self.values.to(dtype), self.lengths)

    @property
    def data(self) -> torch.Tensor:
        """Refused."""
        _refuse_parts()

    @property
    def batch_sizes(self) -> torch.Tensor:
        """Refused."""
        _refuse_parts()

    @property
    def sorted_indices(self) -> torch.Tensor:
        """Refused."""
        _refuse_parts()

    @property
    def unsorted_indices(self) -> torch.Tensor:
        """Refused."""
        _refuse_parts()

    def __iter__(self) -> NoReturn:
        _refuse_parts()


def _refuse_parts() -> NoReturn:
    raise RuntimeError("a part of a packed sequence is read")  # see mirrorc.capture.known_failures


def _pack(input: torch.Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> PaddedSequences:
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
    values = input.transpose(0, 1) if batch_first else input
    if lengths.dim() != 1 or lengths.size(0) != values.size(1):
        raise RuntimeError("pack_padded_sequence is given lengths of another batch")
    known = checked_lengths(lengths, values.size(0), enforce_sorted)
    return PaddedSequences(_filled(values, known, 0.0), known)


def _pad(
    sequence: PaddedSequences, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    values = sequence.values
    if total_length is None:
        raise RuntimeError("pad_packed_sequence is given no total_length")
    if total_length < values.size(0):
        raise ValueError(
            f"total_length={total_length} is less than {values.size(0)}, the length of the padded tensor that was packed"
        )
    padded = F.pad(values, [0, 0] * (values.dim() - 1) + [0, total_length - values.size(0)])
    if padding_value != 0.0:
        padded = _filled(padded, sequence.lengths, padding_value)
    return padded.transpose(0, 1) if batch_first else padded, sequence.lengths


def _filled(values: torch.Tensor, lengths: torch.Tensor, value: float) -> torch.Tensor:
    """Values [time, batch, ...] with another value behind the ends of sequences."""
    time = torch.arange(values.size(0), device=values.device).unsqueeze(1)
    beyond = time >= lengths.to(values.device)
    return values.masked_fill(beyond.reshape(beyond.shape + (1,) * (values.dim() - 2)), value)


PACKING: Mapping[Callable[..., Any], Callable[..., Any]] = {pack_padded_sequence: _pack, pad_packed_sequence: _pad}
"""The functions of torch that pack sequences, and those that are traced in their place."""
