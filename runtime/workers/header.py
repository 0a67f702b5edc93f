"""What workers tell each other at the beginning of a step, and in what they must not differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch

_BITS = 63


def digest(text: str) -> int:
    """A number made of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> (64 - _BITS)


@dataclass(frozen=True)
class Header:
    """What a worker says of its step.

    Attributes:
        call: the number of its training call.
        is_fresh: 1 if it has variables that were not taken over from the chief yet.
        has_written: 1 if the user has written variables or the optimizer's state since the last step.
        schedule: digest of what its program exchanges, and of what else must be alike in programs.
        variables: digest of the variables that it has, those outside of the model included.
        hyperparameters: digest of those of its optimizers, and of the scale of the loss.
        modes: digest of which of its modules are in training mode.
        num_examples: of its batch.
        num_present: how many of its replicas have examples.
        seed: of the step's random streams; that of worker 0 counts.
    """

    call: int
    is_fresh: int
    has_written: int
    schedule: int
    variables: int
    hyperparameters: int
    modes: int
    num_examples: int
    num_present: int
    seed: int

    def to_tensor(self) -> torch.Tensor:
        """The numbers, [fields] int64."""
        return torch.tensor(list(map(int, astuple(self))), dtype=torch.int64)


NUM_FIELDS = len(fields(Header))


@dataclass(frozen=True)
class Agreement:
    """What all workers say of a step that they begin together.

    Attributes:
        num_examples: of all workers.
        num_present: how many replicas of all workers have examples.
        first_present: the rank of the first worker that has examples; 0 if none has.
        seed: of the step's random streams.
        takes_over: whether all must take over the chief's values, and meet again.
        has_chief_written: whether the chief's user has written since the last step.
    """

    num_examples: int
    num_present: int
    first_present: int
    seed: int
    takes_over: bool
    has_chief_written: bool


def agreement(headers: Sequence[torch.Tensor]) -> tuple[Agreement | None, str, int]:
    """What all workers agree about; else None, the first field in which one differs from worker 0, and the rank of that worker.

    While values are yet to be taken over, what depends on them is not compared.

    Args:
        headers: of all workers by rank, [fields] int64.
    """
    said = [Header(*map(int, header)) for header in headers]
    takes_over = any(one.is_fresh for one in said) or len({one.has_written for one in said}) > 1
    for name in ("call", "variables") if takes_over else ("call", "variables", "hyperparameters", "modes", "schedule"):
        other = next((rank for rank, one in enumerate(said) if getattr(one, name) != getattr(said[0], name)), None)
        if other is not None:
            return None, name, other
    counts = sum(one.num_examples for one in said), sum(one.num_present for one in said)
    first = next((rank for rank, one in enumerate(said) if one.num_examples), 0)
    return Agreement(*counts, first, said[0].seed, takes_over, bool(said[0].has_written)), "", -1
