"""Padded sequences, traced in place of packed ones so that shapes do not depend on lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch.nn import functional as F
from torch.nn.modules import rnn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from mirrorc.custom_ops.recurrent import checked_lengths
from mirrorc.torch_internals import traced_file


class PaddedSequences:
    """A padded tensor in place of a PackedSequence, for traces. Recurrent modules use it like a tensor.

    Args:
        values: [batch, time, ...], zeros after the end of each sequence. The time may exceed the longest length.
        lengths: [batch], int64.
        is_sorted: the lengths are in descending order.
    """

    def __init__(self, values: torch.Tensor, lengths: torch.Tensor, is_sorted: bool) -> None:
        self.values, self.lengths, self.is_sorted = values, lengths, is_sorted

    @property  # type: ignore[misc]  # it cannot be written
    def __class__(self) -> type:
        """PackedSequence where user code is traced; PaddedSequences in torch's own recurrent modules."""
        return PaddedSequences if traced_file() in ("", rnn.__file__) else PackedSequence

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dim(self) -> int:
        return self.values.dim()

    def size(self, dim: int) -> int:
        return self.values.size(0) if dim in (0, 1) else self.values.size(dim)

    def to(self, *args: Any, **kwargs: Any) -> PaddedSequences:
        return self.of(self.values.to(*args, **kwargs))

    def of(self, values: torch.Tensor) -> PaddedSequences:
        return PaddedSequences(values, self.lengths, self.is_sorted)

    @property
    def data(self) -> torch.Tensor:
        _refuse_parts()

    batch_sizes = sorted_indices = unsorted_indices = data

    def __iter__(self) -> NoReturn:
        _refuse_parts()


def _refuse_parts() -> NoReturn:
    raise RuntimeError("a part of a packed sequence is read")  # see mirrorc.capture.diagnostics.known_failures


def padded_parts(sequences: PackedSequence | PaddedSequences) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Returns values [batch, time, ...], lengths [batch], and True if the lengths are in descending order.

    The time is rounded up by at most a quarter, so that batches share shapes.
    """
    if isinstance(sequences, PaddedSequences):
        return sequences.values, sequences.lengths, sequences.is_sorted
    step = 1 << max(0, len(sequences.batch_sizes).bit_length() - 3)
    time = -(-len(sequences.batch_sizes) // step) * step
    values, lengths = pad_packed_sequence(sequences, batch_first=True, total_length=time)
    return values, lengths, sequences.sorted_indices is None


def packed_or_padded(values: torch.Tensor, lengths: torch.Tensor, is_sorted: bool) -> PackedSequence | PaddedSequences:
    if torch.compiler.is_dynamo_compiling():
        return PaddedSequences(values, lengths, is_sorted)
    return pack_padded_sequence(values, lengths.cpu(), batch_first=True, enforce_sorted=is_sorted)


def _pack(input: torch.Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> PaddedSequences:
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
    values = input if batch_first else input.transpose(0, 1)
    if lengths.dim() != 1 or lengths.size(0) != values.size(0):
        raise RuntimeError("pack_padded_sequence is given lengths of another batch")
    known = checked_lengths(lengths, values.size(1), enforce_sorted)
    return PaddedSequences(_filled(values, known, 0.0), known, enforce_sorted)


def _pad(
    sequence: PaddedSequences, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    values, lengths = sequence.values, sequence.lengths
    if total_length is None:
        raise RuntimeError("pad_packed_sequence is given no total_length")
    if total_length < values.size(1):
        lengths = checked_lengths(lengths, total_length, False)
        values = _filled(values[:, :total_length], lengths, padding_value)
    else:
        values = F.pad(values, [0, 0] * (values.dim() - 2) + [0, total_length - values.size(1)])
        if padding_value != 0.0:
            values = _filled(values, lengths, padding_value)
    return values if batch_first else values.transpose(0, 1), lengths


def _filled(values: torch.Tensor, lengths: torch.Tensor, value: float) -> torch.Tensor:
    time = torch.arange(values.size(1), device=values.device)
    beyond = time >= lengths.to(values.device).unsqueeze(1)
    return values.masked_fill(beyond.reshape(beyond.shape + (1,) * (values.dim() - 2)), value)


PACKING: Mapping[Callable[..., Any], Callable[..., Any]] = {pack_padded_sequence: _pack, pad_packed_sequence: _pad}
"""Substitutes in a trace for torch's functions that pack sequences."""
