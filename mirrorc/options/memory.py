"""`Memory`: the placement of parameters and optimizer state, and a bound of activations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar, Literal, get_args

import torch

from mirrorc.ir import ops
from mirrorc.ir.links import carries_between_workers, why_memory_is_not_shared
from mirrorc.options.communication import packs_cut_gradients
from mirrorc.options.option import Exclusion, NeededPasses, OptionGroup, Request, option

PlacementName = Literal["auto", "mirrored", "shared", "central", "least-loaded", "cached"]

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_PERCENT = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?%")
_BYTES = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<unit>B|[KMGT]iB)")


def activation_bound(activations: int | str | None) -> float | None:
    """A bound of activations: an int of bytes, or a float as a fraction of the peak without a bound; or None."""
    if activations is None:
        return None
    bound: float = activations if isinstance(activations, int) else 0
    if isinstance(activations, str):
        if part := _PERCENT.fullmatch(activations.strip()):
            bound = float(part["number"]) / 100
            if bound > 1:
                bound = 0
        elif size := _BYTES.fullmatch(activations.strip()):
            bound = int(float(size["number"]) * _UNITS[size["unit"]])
    if bound <= 0:
        raise ValueError(f"MC1002: activations is {activations!r}: {_ACTIVATIONS}")
    return None if isinstance(bound, float) and bound == 1.0 else bound


def bound_text(bound: float) -> str:
    return f"'{100 * bound:g}%'" if isinstance(bound, float) else str(bound)


_ACTIVATIONS = (
    "give a size for each device, such as '2GiB' or a number of bytes, a part of what activations would take, such as '50%', or "
    "None"
)


def _names_owners(placement: Any) -> bool:
    return placement not in ("auto", "mirrored", "shared")


def _placement_passes(placement: Any) -> Sequence[str]:
    if _names_owners(placement):
        return ("place-variables", "update-at-owner")
    return ("share-parameters",) if placement == "shared" else ()


def _no_shared_memory(request: Request) -> str:
    if request["placement"] != "shared" or len(request.devices) == 1:
        return ""
    return why_memory_is_not_shared(request.devices)


def _mirrored_by_a_worker(request: Request) -> str:
    if request["placement"] != "mirrored" or not request.workers.are_several or len(request.devices) == 1:
        return ""
    return "these need to share their parameters, so that a worker sends each sum once"


def _owners_over_workers(request: Request) -> str:
    if not (request.workers.are_several and _names_owners(request["placement"])):
        return ""
    return "an owner updates for the devices of its own process, and each of several workers updates for itself"


def _cut_for_owners(request: Request) -> str:
    if not (_names_owners(request["placement"]) and packs_cut_gradients(request)):
        return ""
    return "packs end within gradients there, whose parts would go to owners apart"


def _cut_for_workers(request: Request) -> str:
    if not (request.workers.are_several and packs_cut_gradients(request)):
        return ""
    return "packs end within gradients, and workers would get parts of parts"


def _no_parts_of_sums(request: Request) -> str:
    if not request.workers.are_several or carries_between_workers(request.devices, ops.scatter_sums):
        return ""
    return "what joins workers there carries no parts of sums"


@dataclass(frozen=True, kw_only=True)
class Memory(OptionGroup):
    """The placement of parameters and optimizer state, and a bound of activations, for ``memory=`` of
    `mirrorc.compile`.

    Attributes:
        activations: the bound of each device's peak of activations and passing sums, as `Step.memory` counts them: a
            size, ``"2GiB"`` or a number of bytes; or ``"50%"`` of the peak without a bound (of the worst device, in the
            largest batch so far). Backward recomputes those values of forward that take least time. Results are the
            same (with Inductor, up to the last bits). The step is compiled several times, until it is within the bound.
            None for no bound.
        shard_optimizer: each worker updates a shard of every bucket, and has only the optimizer state of that shard;
            new parameters are all-gathered. Before ``optimizer.state_dict()``, all workers call
            `Step.gather_optimizer_state`.
        placement: where parameters are, and which devices update them. "shared": one copy in memory that all devices
            share; each updates a share. "mirrored": a whole copy on each device, which updates it. "auto": "shared"
            where possible, else "mirrored". "central": the first device has all sums, updates and optimizer state.
            "least-loaded": parameters are distributed over devices by bytes, the largest first; a parameter's owner
            sums and updates it, and all other devices write a copy once a step. "cached": the same for large
            parameters; the first device owns small ones. A dict names owners, ``{"embedding.weight": "cpu:0"}``, as a
            device's name or a `torch.device`, with ``"*"`` for all others: a device, "central", "least-loaded" or
            "cached". Results differ at most in the last bits, by the order of additions or the cuts of compiled
            regions.

    Raises:
        TypeError, ValueError: a field has another kind or value; names it and the remedy.
    """

    keyword: ClassVar[str] = "memory"

    activations: int | str | None = option(
        None,
        _ACTIVATIONS,
        kinds=(int, str, NoneType),
        passes=NeededPasses(
            ("choose-checkpoints", "recompute-checkpoints"),
            "put mirrorc.passes.ChooseCheckpoints() there, before RecomputeCheckpoints",
            may_be_in_passes=True,
        ),
    )
    shard_optimizer: bool = option(
        False,
        "say True, to deal the optimizer's state out to the workers, or False",
        kinds=(bool,),
        passes=NeededPasses(
            ("shard-optimizer",),
            "put mirrorc.passes.ShardOptimizer() behind ReduceOverWorkers() there",
            may_be_in_passes=True,
        ),
        excludes=(
            Exclusion("on devices of the type {request.device_type!r} yet", _no_parts_of_sums),
            Exclusion("buckets", _cut_for_workers, "buckets=25, or another plan of whole gradients"),
        ),
    )
    placement: PlacementName | Mapping[str, str | torch.device] = option(
        "auto",
        "say 'auto', 'mirrored', 'shared', 'central', 'least-loaded' or 'cached', or give a dict with the owners of "
        "parameters, such as {'embedding.weight': 'cpu:0', '*': 'least-loaded'}",
        kinds=(Mapping,),
        texts=get_args(PlacementName),
        passes=NeededPasses(
            _placement_passes,
            "put mirrorc.passes.ShareParameters() there, or PlaceVariables() behind PlanBuckets() and UpdateAtOwner() behind "
            "ScheduleOverlap()",
        ),
        excludes=(
            Exclusion("on {request.device_names}", _no_shared_memory, "use 'mirrored', or 'auto'"),
            Exclusion(
                "for several devices of one of several workers yet",
                _mirrored_by_a_worker,
                "leave placement= out, or give each worker one device",
            ),
            Exclusion(
                "over several workers",
                _owners_over_workers,
                "use shard_optimizer=True, which deals the update out to workers, and leave placement out",
            ),
            Exclusion("buckets", _cut_for_owners, "give a plan of whole gradients"),
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        activation_bound(self.activations)
