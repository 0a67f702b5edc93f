"""Ways to take the two columns of a matrix, as views of its memory: several parts at once, and one after the other."""

from collections.abc import Callable

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


def _pair(parts: tuple[torch.Tensor, ...] | list[torch.Tensor]) -> Pair:
    one, other = parts
    return one, other


WAYS: dict[str, Callable[[torch.Tensor], Pair]] = {
    "split": lambda matrix: _pair(torch.split(matrix, 1, dim=1)),
    "split-into-sizes": lambda matrix: _pair(torch.split(matrix, [1, 1], dim=1)),
    "split-twice": lambda matrix: _pair(matrix.chunk(1, 1)[0].chunk(2, 1)),
    "split-transposed": lambda matrix: _pair([part.t() for part in matrix.t().chunk(2)]),
    "unbind": lambda matrix: _pair([part.unsqueeze(1) for part in matrix.unbind(1)]),
    "slices": lambda matrix: (matrix[:, :1], matrix.narrow(1, 1, 1)),
}
"""Each takes a matrix of two columns, and gives two matrices of one column."""
