"""Orthonormal columns, with the same bits on every processor and with any number of threads.

Products of matrices, and sums over a dimension, add up in an order that depends on the processor and the threads. Here all sums
are the last of cumulative sums, which have one order, of numbers of 64 bits, so that workers may differ in both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SHORTEST = 1e-13  # what is left of a unit vector that lies in the span of others, by rounding


def orthonormal_columns(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each matrix [n, r], one [n, r] of the same dtype whose columns are orthonormal and span the same, contiguous.

    A column that lies in the span of those before it becomes zero. What is not finite makes its column, and those behind it, NaN.
    Matrices of one shape are computed together, by Gram-Schmidt, twice.
    """
    found: list[torch.Tensor] = list(matrices)
    groups: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for place, matrix in enumerate(matrices):
        groups.setdefault((matrix.shape, matrix.dtype), []).append(place)
    for (_, dtype), places in groups.items():
        made = _orthonormal(torch.stack([matrices[place].T for place in places]).double())
        for place, own in zip(places, made, strict=True):
            found[place] = own.T.to(dtype).contiguous()
    return found


def _orthonormal(vectors: torch.Tensor) -> torch.Tensor:
    """Of [matrices, vectors, elements], in 64 bits: the vectors of each matrix made orthonormal, one after the other."""
    largest = vectors.abs().amax(-1, keepdim=True)
    found = _unit(vectors / torch.where(largest == 0, 1, largest), 0)
    for k in range(1, found.shape[1]):
        before, vector = found[:, :k], found[:, k]
        for _ in range(2):
            parts = _sums(before * vector[:, None])
            for part, one in zip(parts.split(1, 1), before.unbind(1), strict=True):
                vector = vector - part * one
        found[:, k] = _unit(vector, _SHORTEST)
    return found


def _unit(vectors: torch.Tensor, shortest: float) -> torch.Tensor:
    """Vectors [..., elements] of length 1; zero for those that are no longer than the shortest."""
    lengths = _sums(vectors * vectors).sqrt()[..., None]
    return torch.where(lengths <= shortest, 0, vectors / lengths)


def _sums(values: torch.Tensor) -> torch.Tensor:
    """The sums over the last dimension, from the first element to the last."""
    return values.cumsum(-1)[..., -1]
