"""Decides the form of each gradient from the proposals of all workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mirrorc.analysis.cost.link_speed import Candidate, LinkSpeed
from mirrorc.errors import CommunicationError
from mirrorc.ir.workers import Workers
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted
from mirrorc.options.communication import Exchange
from mirrorc.printing.printed_values import size_text


@dataclass(frozen=True)
class Figures:
    """The proposal of a worker.

    Attributes:
        rows: this worker's number of rows in each candidate's factors.
        machine: facts that determine the bits of a matrix product.
        seconds_per_byte, seconds_per_multiplication: of the link and the processor; 0 if not measured.
        loaded: the choice of an earlier run; only worker 0's is used.
    """

    rows: Mapping[str, int]
    machine: Mapping[str, str]
    seconds_per_byte: float = 0.0
    seconds_per_multiplication: float = 0.0
    loaded: Sequence[str] | None = None


def choose_sent_as_factors(
    candidates: Sequence[Candidate], everyone: Sequence[Figures], workers: Workers, exchange: Exchange
) -> tuple[tuple[str, ...], str]:
    """The variables whose gradients are sent as factors, and a remark with the reason; equal on all workers.

    With a sharded optimizer, each part of a gradient is computed on one worker, so machines may compute different bits.

    Raises:
        CommunicationError: factors are asked for, but the machines would compute different gradients from them.
    """
    candidates = [gradient for gradient in candidates if all(gradient.variable in figures.rows for figures in everyone)]
    if not candidates:
        return (), ""
    is_dealt = workers.shards_optimizer
    if not is_dealt and (why_not := why_bits_differ(everyone, workers.devices_per_worker)):
        if exchange == "factors":
            raise problem(
                CommunicationError,
                "MC6105: exchange='factors' needs machines and settings that are alike",
                f"{why_not}, so that parameters would drift apart in the last bits",
                (
                    "communication=mirrorc.Communication(exchange='dense')",
                    "give all workers the same machines and settings",
                ),
                now="No parameter was changed",
            )
        return (
            (),
            f"workers send all gradients whole, none as factors: {why_not}, and bits of a product may depend on it",
        )
    loaded = everyone[0].loaded
    if exchange == "factors":
        as_factors = candidates
    elif loaded is not None:
        as_factors = [gradient for gradient in candidates if gradient.variable in loaded]
    else:
        link = LinkSpeed(0.0, max(figures.seconds_per_byte for figures in everyone))  # the slowest, of large messages
        work = max(figures.seconds_per_multiplication for figures in everyone)
        as_factors = [
            gradient
            for gradient in candidates
            if gradient.is_cheaper_as_factors(_rows(gradient, everyone), link, work, is_dealt=is_dealt)
        ]
    return tuple(gradient.variable for gradient in as_factors), _remark(
        candidates, as_factors, everyone, exchange, is_dealt=is_dealt
    )


def why_bits_differ(everyone: Sequence[Figures], devices_per_worker: Sequence[int]) -> str:
    """Why workers compute different bits of a matrix product; empty if they do not."""
    other = next((rank for rank, number in enumerate(devices_per_worker) if number != devices_per_worker[0]), None)
    if other is not None:
        return (
            f"worker 0 has {counted(devices_per_worker[0], 'device')}, worker {other} has {devices_per_worker[other]}"
        )
    for name, value in everyone[0].machine.items():
        for rank, figures in enumerate(everyone):
            if figures.machine.get(name) != value:
                return f"workers 0 and {rank} differ in {name}: {value:.80} and {figures.machine.get(name):.80}"
    return ""


def _remark(
    candidates: Sequence[Candidate],
    as_factors: Sequence[Candidate],
    everyone: Sequence[Figures],
    exchange: Exchange,
    *,
    is_dealt: bool,
) -> str:
    per_byte = max(figures.seconds_per_byte for figures in everyone)
    link = f"a link of {1 / per_byte / 1e6:.0f} MB/s" if per_byte else "bytes alone"
    why = "asked for" if exchange == "factors" else f"chosen by {link}"
    if exchange != "factors" and everyone[0].loaded is not None:
        why = "as in the state that was loaded"
    bytes_of = {}
    for gradient in candidates:
        whole, factors = gradient.messages(_rows(gradient, everyone), is_dealt=is_dealt)
        bytes_of[gradient.variable] = factors.num_bytes, whole.num_bytes
    return exchange_remark("workers", why, "from each worker", bytes_of, [gradient.variable for gradient in as_factors])


def _rows(gradient: Candidate, everyone: Sequence[Figures]) -> list[int]:
    return [figures.rows[gradient.variable] for figures in everyone]


def exchange_remark(
    senders: str, why: str, direction: str, bytes_of: Mapping[str, tuple[float, float]], as_factors: Collection[str]
) -> str:
    """``bytes_of`` has the bytes of the factors and of the whole sum."""
    sizes = [
        f"{name} {'as factors' if name in as_factors else 'whole'} ({' against '.join(size_text(round(n)) for n in pair)})"
        for name, pair in bytes_of.items()
    ]
    return (
        f"how {senders} send gradients ({why}; as factors against whole, {direction}): {', '.join(sizes)}; others whole"
    )
