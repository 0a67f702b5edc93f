"""Links: transports of collectives between devices."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mirrorc.ir import ops
from mirrorc.ir.devices import Device, have_shared_memory
from mirrorc.messages.problem import problem

_DEVICE_NAMES = {"cpu": "logical CPUs", "cuda": "GPUs"}


class Span(enum.Enum):
    DEVICES = "devices of one worker"
    WORKERS = "workers"


class SumPlace(enum.Enum):
    FIRST = "first"  # in replica 0's bucket, for all replicas
    EACH = "own"  # in each replica's own bucket
    ADDITIONAL = "additional"  # in memory that the wait allocates


@dataclass(frozen=True)
class Link:
    """A transport of collectives.

    Attributes:
        device_type: torch's name of it; None for any.
        why_not: why the link cannot join some devices; empty if it can.
        preference: the highest is the default. None for a link used only by name.
        reads_shared_memory: replicas read each other's buckets in place.
        moves_by_itself: transfers overlap with computation.
        carries: operations; ``send`` includes ``recv``.
        falls_back_to: the link for all other operations.
        keeps_operands: operands stay allocated until the next step.
    """

    name: str
    device_type: str | None = None
    why_not: Callable[[Sequence[Device]], str] = lambda devices: ""
    preference: int | None = None
    reads_shared_memory: bool = False
    moves_by_itself: bool = False
    carries: tuple[Any, ...] = (ops.all_reduce, ops.reduce_scatter, ops.reduce, ops.all_gather, ops.send)
    falls_back_to: str = ""
    sum_place: SumPlace = SumPlace.ADDITIONAL
    keeps_operands: bool = True
    spans: Span = Span.DEVICES

    def objection(self, devices: Sequence[Device], spans: Span = Span.DEVICES) -> str:
        if self.spans is not spans:
            return f"it joins {self.spans.value}, not {spans.value}"
        if not self.is_for(devices):
            return f"it joins {_DEVICE_NAMES.get(str(self.device_type), self.device_type)}"
        return self.why_not(devices)

    def is_for(self, devices: Sequence[Device]) -> bool:
        return self.device_type is None or all(d.torch_device.type == self.device_type for d in devices)


_links: dict[str, Link] = {}


def register_link(link: Link) -> None:
    if _links.setdefault(link.name, link) != link:
        raise ValueError(f"MC4005: there is a link {link.name!r} already: give this one another name")


def unregister_link(name: str) -> None:
    del _links[name]


def link_names() -> tuple[str, ...]:
    return tuple(name for name, link in _links.items() if link.spans is Span.DEVICES)


def link_named(name: object) -> Link:
    link = _links.get(str(name))
    if link is None:
        raise ValueError(f"MC1002: link is {name!r}: give one of {', '.join(link_names())}, or None for the best")
    return link


def carrier_of(link: str, operation: Any) -> str:
    chosen = link_named(link)
    if operation in chosen.carries:
        return chosen.name
    if not chosen.falls_back_to:
        raise ValueError(
            f"MC1104: link {link!r} does not carry {operation.__name__} and names no link that does: leave link= out"
        )
    return carrier_of(chosen.falls_back_to, operation)


def best_link(devices: Sequence[Device], spans: Span = Span.DEVICES) -> tuple[str, str]:
    """The default link, and a remark that says why a preferred link was not taken."""
    known = [link for link in _links.values() if link.spans is spans]
    ranked = [(link.preference, link) for link in known if link.preference is not None]
    declined: list[tuple[str, str]] = []
    for _, link in sorted(ranked, key=lambda pair: -pair[0]):
        if not link.is_for(devices):
            continue
        objection = link.why_not(devices)
        if not objection:
            return link.name, "; ".join(f"link {link.name} instead of {name}: {why}" for name, why in declined)
        declined.append((link.name, objection))
    raise problem(
        ValueError,
        f"MC1104: no link joins {', '.join(map(str, devices))}",
        "a link is how devices exchange gradients, and none is registered for these",
        (
            "devices=['cpu:0', 'cpu:1'], or others of one kind",
            "mirrorc.ir.links.register_link(...), for a link of your own",
        ),
    )


def carries_between_workers(devices: Sequence[Device], operation: Any) -> bool:
    return operation in link_named(best_link(devices, Span.WORKERS)[0]).carries


def why_no_factors_for_workers(link: str | None, devices: Sequence[Device]) -> str:
    """Why a worker cannot send factors of gradients; empty if it can. ``link`` joins the worker's own devices."""
    if not carries_between_workers(devices, ops.gather_factors):
        return "what joins workers there adds up whole buckets, and gathers no factors"
    if (
        len(devices) > 1
        and not link_named(carrier_of(link or best_link(devices)[0], ops.reduce_scatter)).reads_shared_memory
    ):
        return (
            f"over link={link!r}, no device reads the others' factors in their memory, so a worker has whole sums alone"
        )
    return ""


def check_link(link: str | None, devices: Sequence[Device], spans: Span = Span.DEVICES) -> None:
    if link is None:
        return
    objection = link_named(link).objection(devices, spans)
    if objection:
        names = ", ".join(device.name for device in devices)
        others = " or ".join(repr(other.name) for other in _links.values() if not other.objection(devices, spans))
        raise problem(
            ValueError, f"MC1104: link={link!r} cannot join {names}", objection, f"link={others}, or None for the best"
        )


def why_memory_is_not_shared(devices: Sequence[Device]) -> str:
    """Why devices cannot work on one copy of the parameters; empty if they can."""
    if not have_shared_memory(devices):
        return "the devices do not share one memory"
    if not any(link.reads_shared_memory and not link.objection(devices) for link in _links.values()):
        return "no link lets the devices read each other's buckets in the memory that they share"
    return ""


register_link(
    Link(
        "shared-memory",
        device_type="cpu",
        why_not=lambda devices: "" if have_shared_memory(devices) else "they do not share one memory",
        preference=1,
        reads_shared_memory=True,
        sum_place=SumPlace.FIRST,
        keeps_operands=False,
    )
)
register_link(
    Link(
        "nccl",
        device_type="cuda",
        why_not=lambda devices: "some devices share one GPU" if len({d.memory for d in devices}) < len(devices) else "",
        preference=1,
        moves_by_itself=True,
        carries=(ops.all_reduce,),
        falls_back_to="copy",
        sum_place=SumPlace.EACH,
    )
)
register_link(Link("copy", preference=0))
_BETWEEN_WORKERS = Link(
    "gloo",
    device_type="cpu",
    preference=1,
    moves_by_itself=True,
    carries=tuple(ops.BETWEEN_WORKERS),
    sum_place=SumPlace.EACH,
    keeps_operands=False,
    spans=Span.WORKERS,
)
register_link(_BETWEEN_WORKERS)
register_link(replace(_BETWEEN_WORKERS, name="nccl-workers", device_type="cuda", carries=(ops.exchange,)))
