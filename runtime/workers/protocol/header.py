"""What workers tell each other at the beginning of a step, and in what they must not differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch

from mirrorc.ir.program import Accumulation

_BITS = 63


def digest(text: str) -> int:
    """A number made of a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> (64 - _BITS)


@dataclass(frozen=True)
class Header:
    """What a worker says of its step.

    Attributes:
        call: the number of its training call.
        is_fresh: 1 if it has variables that were not taken over yet.
        written: digest of the variables and the optimizer's state where the user has written to them since the last step; 0 for
            nothing.
        schedule: digest of what its program exchanges, and of what else must be alike in programs.
        variables: digest of the variables that it has, those outside of the model included.
        hyperparameters: digest of those of its optimizers, and of the scale of the loss.
        modes: digest of which of its modules are in training mode.
        num_examples: of its batch.
        num_present: how many of its replicas have examples.
        seed: of the step's random streams; that of worker 0 counts.
        kind: what its program does with the gradients of several calls, see `kind_of`; a worker that has left can only guess it.
            `BESIDES` for a call that is no training call, `TURN` for a meeting before one.
        num_kept_calls, num_kept: of how many calls it keeps gradients, and how many examples these had.
        parameters: digest of those that are updated by optimizers that are not element-wise, which each worker runs; 0 for none.
        num_steps: how many steps it has made, of those that count for comparisons of copies.
        has_left: 1 if it makes no calls of its own any more, and takes part in those of others, see `mirrorc.step.Step.join`.
        num_counts, counts: how many numbers of rows there are of the factors that its program sends, and their digest.
        known: digest of all the numbers of rows that workers have told it.
        deals_anew: 1 if it has a part of the optimizer's state for other buckets than its program has.
        turn: the number of the step that it calls next, of those of its block, see `mirrorc.join`.
    """

    call: int
    is_fresh: int = 0
    written: int = 0
    schedule: int = 0
    variables: int = 0
    hyperparameters: int = 0
    modes: int = 0
    num_examples: int = 0
    num_present: int = 0
    seed: int = 0
    kind: int = 0
    num_kept_calls: int = 0
    num_kept: int = 0
    parameters: int = 0
    num_steps: int = 0
    has_left: int = 0
    num_counts: int = 0
    counts: int = 0
    known: int = 0
    deals_anew: int = 0
    turn: int = 0

    def to_tensor(self) -> torch.Tensor:
        """The numbers, [fields] int64."""
        return torch.tensor(list(map(int, astuple(self))), dtype=torch.int64)


NUM_FIELDS = len(fields(Header))
BESIDES, TURN = -1, -2


def kind_of(accumulation: Accumulation) -> int:
    """The number by which workers tell each other what a program does with the gradients of several calls."""
    return list(Accumulation).index(accumulation)


@dataclass(frozen=True)
class Agreement:
    """What all workers say of a step that they begin together.

    Attributes:
        num_examples: of all workers.
        num_present: how many replicas of all workers have examples.
        present: how many of each worker, by rank.
        num_kept: of the calls whose gradients any worker keeps.
        num_steps: as that worker counts them whose values the others would take over.
        accumulation: what all programs do with the gradients of several calls.
        is_other: whether some workers have come with a program that does something else, so that all must meet again.
        first_present: the rank of the first worker that has examples; 0 if none has.
        seed: of the step's random streams.
        takes_over: whether all must take over the source's values, and meet again.
        source: the rank of the first worker that has not left, whose values the others take over; 0 if there is none.
        written: digest of what that worker's user has written since the last step; 0 for nothing.
        tells_hyperparameters: whether it tells its hyperparameters to workers that have left, which have others.
        is_over: whether all have left.
        deals_anew: whether all make the optimizer's state whole, to deal it out anew.
        turn: the number of the step that is called next, where they meet before a call of one of several.
    """

    num_examples: int
    num_present: int
    present: tuple[int, ...]
    num_kept: int
    num_steps: int
    accumulation: Accumulation
    is_other: bool
    first_present: int
    seed: int
    takes_over: bool
    source: int
    written: int
    tells_hyperparameters: bool
    is_over: bool
    deals_anew: bool
    turn: int


def agreement(headers: Sequence[torch.Tensor]) -> tuple[Agreement | None, str, int]:
    """What all workers agree about; else None, the first field in which one differs from the first that has not left, and whose.

    While values are yet to be taken over, or programs to be found that go together, what depends on them is not compared.
    Where any worker keeps gradients of earlier calls, the programs of all end an accumulation.

    Args:
        headers: of all workers by rank, [fields] int64.
    """
    said = [Header(*map(int, header)) for header in headers]
    source = next((rank for rank, one in enumerate(said) if not one.has_left), 0)
    is_over = all(one.has_left for one in said)
    takes_over = not is_over and (any(one.is_fresh for one in said) or len({one.written for one in said}) > 1)
    adds = said[source].kind == kind_of(Accumulation.ADDS)
    ends = any(one.num_kept_calls for one in said)
    accumulation = Accumulation.ADDS if adds else Accumulation.ENDS if ends else Accumulation.NONE
    is_other = not is_over and any(one.kind >= 0 and one.kind != kind_of(accumulation) for one in said)
    of_programs = () if is_other else ("schedule", "parameters", "deals_anew")
    of_values = () if takes_over or is_over else ("hyperparameters", "modes", *of_programs)
    for name in ("call", "kind", "turn", "variables", *of_values):
        other = next((rank for rank, one in enumerate(said) if _differs(one, said[source], name)), None)
        if other is not None:
            return None, name, other
    first = next((rank for rank, one in enumerate(said) if one.num_examples), 0)
    tells = not is_over and any(one.hyperparameters != said[source].hyperparameters for one in said)
    found = Agreement(
        num_examples=sum(one.num_examples for one in said),
        num_present=sum(one.num_present for one in said),
        present=tuple(one.num_present for one in said),
        num_kept=sum(one.num_kept for one in said),
        num_steps=said[source].num_steps,
        accumulation=accumulation,
        is_other=is_other,
        first_present=first,
        seed=said[0].seed,
        takes_over=takes_over,
        source=source,
        written=said[source].written,
        tells_hyperparameters=tells,
        is_over=is_over,
        deals_anew=not (is_other or takes_over or is_over) and bool(said[source].deals_anew),
        turn=said[source].turn,
    )
    return found, "", -1


def _differs(one: Header, source: Header, name: str) -> bool:
    """Whether two workers differ in a field in which they must not; one that has left takes over hyperparameters, what calls
    are for, and of which step they are. Whether a call that updates ends an accumulation is no difference: it does on all
    workers, or on none."""
    if name == "kind" and min(one.kind, source.kind) < 0:
        return one.kind != source.kind
    if one.has_left and name in ("hyperparameters", "kind", "turn"):
        return False
    if name == "kind":
        adds = kind_of(Accumulation.ADDS)
        return (one.kind == adds) != (source.kind == adds)
    return bool(getattr(one, name) != getattr(source, name))
