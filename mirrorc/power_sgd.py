"""By how few numbers workers send each gradient that is a matrix, for ``compression=`` of `mirrorc.compile`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real


@dataclass(frozen=True)
class PowerSGD:
    """Workers send two thin factors of each gradient that is a matrix, as PowerSGD does (Vogels, Karimireddy, Jaggi, 2019).

    Each worker adds what the factors leave out to its gradient in the next step.

    Attributes:
        rank: how many columns each factor has, of every matrix: 1 or more.
        min_compression_rate: how many times as long as its factors a matrix must be at least to be sent so: 1 or more, and its
            factors are shorter than it in any case. All other gradients are sent whole.
        start_step: how many steps send all gradients whole before: 0 or more. The steps that have taken place are counted; what
            `mirrorc.Step.load_unsent_states` is given goes on with its count.
        seed: of the random numbers from which the factors begin. Those of each matrix follow from it and from the name of the
            parameter alone, so all workers have the same, in every run.
    """

    rank: int = 1
    min_compression_rate: float = 2.0
    start_step: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start_step", 0), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} is {value!r}: give a whole number, {least} or more")
            if value < least:
                raise ValueError(f"{name} is {value!r}: give a whole number, {least} or more")
        rate = self.min_compression_rate
        if not isinstance(rate, Real) or isinstance(rate, bool):
            raise TypeError(f"min_compression_rate is {rate!r}: give a number, 1 or more, such as 2")
        if not 1 <= rate < math.inf:
            raise ValueError(f"min_compression_rate is {rate!r}: give a number, 1 or more, such as 2")

    def shortens(self, rows: int, columns: int) -> bool:
        """Whether a matrix of this size is sent as factors."""
        length = self.rank * (rows + columns)
        return length < rows * columns and length * self.min_compression_rate <= rows * columns
