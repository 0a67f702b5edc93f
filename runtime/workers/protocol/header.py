"""Headers that workers exchange before a call, their agreement, and the row counts of their factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import torch

from mirrorc.cluster.consistency import digest
from mirrorc.ir.program import Accumulation

Counts = tuple[int, ...]
_MOST_COUNTS = 4096  # kinds of batches
RunControl = Callable[[Callable[[Any], Any]], None]

Details = Callable[[], Mapping[str, object]]
"""Returns the facts behind a header field, by name. Called if workers differ in the field."""


@dataclass(frozen=True)
class Header:
    """A worker's description of its next call.

    Attributes:
        is_fresh: 1 if variables of this worker have not been broadcast.
        written: digest of the user's writes since the last step; 0 for none.
        schedule: digest of facts common to all programs, such as exchanges.
        variables: digest of all variables' dtypes and shapes.
        hyperparameters: digest of the optimizers' hyperparameters and the scaler's state.
        modes: digest of the modules' training modes.
        seed: only worker 0's seed is used.
        kind: see `kind_of`; a guess by a worker that has left its loop. `BESIDES` for a call that does not train,
            `TURN` for an exchange before a call.
        parameters: digest of parameters whose optimizers are not element-wise; 0 for none.
        num_steps: steps so far; they decide when replicas are compared.
        has_left: 1 if this worker's loop has ended, and it only joins calls of others.
        num_counts, counts: number and digest of the row counts of this worker's factors.
        known: digest of this worker's cache, see `KnownCounts`.
        deals_anew: 1 if the shards of the optimizer state do not fit this worker's buckets.
        turn: number of the next step within `mirrorc.join`.
        batch: digest of the first batches, see `EqualBatches`; 0 for none.
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
    num_accumulated_calls: int = 0
    num_accumulated: int = 0
    parameters: int = 0
    num_steps: int = 0
    has_left: int = 0
    num_counts: int = 0
    counts: int = 0
    known: int = 0
    deals_anew: int = 0
    turn: int = 0
    batch: int = 0

    def to_tensor(self) -> torch.Tensor:
        return torch.tensor(list(map(int, astuple(self))), dtype=torch.int64)

    @classmethod
    def of(cls, message: torch.Tensor) -> Header:
        return cls(*message.tolist())


NUM_FIELDS = len(fields(Header))
BESIDES, TURN = -1, -2


def kind_of(accumulation: Accumulation) -> int:
    return list(Accumulation).index(accumulation)


_WITHOUT_UPDATE = {
    kind_of(accumulation): accumulation
    for accumulation in (Accumulation.ADDS, Accumulation.GRADIENTS, Accumulation.FORWARD)
}


@dataclass(frozen=True)
class Agreement:
    """The workers' agreement on a call. The source is the first worker whose loop has not ended.

    Attributes:
        num_examples, num_accumulated, num_present: sums over all workers; ``present`` has ``num_present`` by rank.
        is_other: a worker needs a program with other accumulation; headers are then exchanged again.
        first_present: rank of the first worker with examples; 0 if none has any.
        takes_over: all workers receive the source's values, and exchange headers again.
        source: the source's rank; 0 without one.
        tells_hyperparameters: the source broadcasts hyperparameters to workers whose loop has ended.
        deals_anew: all workers gather the optimizer state, to shard it again.
    """

    num_examples: int
    num_present: int
    present: tuple[int, ...]
    num_accumulated: int
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
    batches: tuple[int, ...]


def agreement(headers: Sequence[Header]) -> tuple[Agreement | None, str, int]:
    """The workers' agreement; or None, the first differing field, and a rank that differs from the source.

    Fields are not compared if their values or programs are about to change. If any worker has accumulated gradients, a
    step ends the accumulation on all.
    """
    source = next((rank for rank, peer in enumerate(headers) if not peer.has_left), 0)
    is_over = all(peer.has_left for peer in headers)
    takes_over = not is_over and (any(peer.is_fresh for peer in headers) or len({peer.written for peer in headers}) > 1)
    ends = any(peer.num_accumulated_calls for peer in headers)
    accumulation = _WITHOUT_UPDATE.get(headers[source].kind, Accumulation.ENDS if ends else Accumulation.NONE)
    is_other = not is_over and any(peer.kind >= 0 and peer.kind != kind_of(accumulation) for peer in headers)
    of_programs = () if is_other else ("schedule", "parameters", "deals_anew")
    of_values = () if takes_over or is_over else ("hyperparameters", "modes", *of_programs)
    for name in ("call", "kind", "turn", "variables", *of_values):
        other = next((rank for rank, peer in enumerate(headers) if _differs(peer, headers[source], name)), None)
        if other is not None:
            return None, name, other
    first = next((rank for rank, peer in enumerate(headers) if peer.num_examples), 0)
    tells = not is_over and any(peer.hyperparameters != headers[source].hyperparameters for peer in headers)
    agreed = Agreement(
        num_examples=sum(peer.num_examples for peer in headers),
        num_present=sum(peer.num_present for peer in headers),
        present=tuple(peer.num_present for peer in headers),
        num_accumulated=sum(peer.num_accumulated for peer in headers),
        num_steps=headers[source].num_steps,
        accumulation=accumulation,
        is_other=is_other,
        first_present=first,
        seed=headers[0].seed,
        takes_over=takes_over,
        source=source,
        written=headers[source].written,
        tells_hyperparameters=tells,
        is_over=is_over,
        deals_anew=not (is_other or takes_over or is_over) and bool(headers[source].deals_anew),
        turn=headers[source].turn,
        batches=tuple(peer.batch for peer in headers),
    )
    return agreed, "", -1


def _differs(header: Header, source: Header, name: str) -> bool:
    """True if a field differs. A worker whose loop has ended adopts hyperparameters, turn and kind. NONE equals ENDS."""
    if name == "kind" and min(header.kind, source.kind) < 0:
        return header.kind != source.kind
    if header.has_left and name in ("hyperparameters", "kind", "turn"):
        return False
    if name == "kind":
        return _WITHOUT_UPDATE.get(header.kind) is not _WITHOUT_UPDATE.get(source.kind)
    return bool(getattr(header, name) != getattr(source, name))


class KnownCounts:
    """Row counts of all workers, cached by digest.

    If a worker does not have a digest, or caches differ after an unfinished call, all workers send their counts.
    """

    def __init__(self) -> None:
        self._by_digest: dict[int, Counts] = {}
        self._digest: int | None = None  # of the digests; None if they have changed since

    def noted_in(self, header: Header, counts: Counts) -> Header:
        if self._digest is None:
            self._digest = digest(repr(sorted(self._by_digest)))
        return replace(header, num_counts=len(counts), counts=digest(repr(counts)), known=self._digest)

    def of_all(self, headers: Sequence[Header], counts: Counts, run_control: RunControl) -> list[Counts]:
        """Row counts of all workers, by rank. ``run_control`` runs a collective of all workers."""
        length = max(peer.num_counts for peer in headers)
        if not length:
            return [() for _ in headers]
        if len({peer.known for peer in headers}) > 1 or not all(peer.counts in self._by_digest for peer in headers):
            padded = torch.zeros(length, dtype=torch.int64)
            padded[: len(counts)] = torch.tensor(counts, dtype=torch.int64)
            gathered = [torch.empty_like(padded) for _ in headers]
            run_control(lambda group: group.all_gather(padded, gathered))
            self._digest = None
            if len({peer.known for peer in headers}) > 1 or len(self._by_digest) > _MOST_COUNTS:
                self._by_digest = {}  # all workers clear their caches
            for peer, numbers in zip(headers, gathered, strict=True):
                self._by_digest[peer.counts] = tuple(map(int, numbers[: peer.num_counts]))
        return [self._by_digest[peer.counts] for peer in headers]
