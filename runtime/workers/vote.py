"""What a worker tells the others at the end of a step, before it commits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Vote:
    """What a worker tells the others of a step, when it has done all of it that can fail.

    Attributes:
        takes_place: whether the step takes place, as far as this worker knows.
        has_sound_sums: whether all that it has found in sums over all workers is finite, which must be the same on all of them.
        numbers: those that its replicas have left, [numbers of each, replicas]; None for none. All go on with the chief's.
    """

    takes_place: bool
    has_sound_sums: bool = True
    numbers: torch.Tensor | None = None
