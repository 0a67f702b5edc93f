"""The compiler passes, and the only list of their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from mirrorc.compression import Payload, TopK, check_payload
from mirrorc.packing import ByBytes, GradientOrder, Packing
from mirrorc.passes.all_reduce import ALGORITHMS, AllReduceAlgorithm
from mirrorc.passes.lowering.lower_collectives import LowerCollectives
from mirrorc.passes.lowering.lower_devices import LowerDevices
from mirrorc.passes.operators.choose_checkpoints import ChooseCheckpoints
from mirrorc.passes.operators.decompose_gelu import DecomposeGelu
from mirrorc.passes.operators.lay_channels_last import LayChannelsLast
from mirrorc.passes.operators.pad_products import PadProducts
from mirrorc.passes.operators.read_row_elements import ReadRowElements
from mirrorc.passes.operators.recompute_checkpoints import RecomputeCheckpoints
from mirrorc.passes.operators.recompute_elementwise import RecomputeElementwise
from mirrorc.passes.regions.accumulate_microbatches import AccumulateMicrobatches
from mirrorc.passes.regions.factor_gradients import FactorGradients
from mirrorc.passes.regions.outline_regions import OutlineRegions
from mirrorc.passes.regions.place_gradients import PlaceGradients
from mirrorc.passes.regions.place_variables import CACHED, CENTRAL, LEAST_LOADED, PlaceVariables
from mirrorc.passes.regions.plan_buckets import PlanBuckets
from mirrorc.passes.regions.reserve_memory import ReserveMemory
from mirrorc.passes.regions.reuse_arguments import ReuseArguments
from mirrorc.passes.replicas.insert_all_reduce import InsertAllReduce
from mirrorc.passes.replicas.insert_update import InsertUpdate
from mirrorc.passes.replicas.pack_gradients import PackGradients
from mirrorc.passes.replicas.replicate import Replicate
from mirrorc.passes.replicas.schedule_overlap import ScheduleOverlap
from mirrorc.passes.replicas.send_rows import SendRows
from mirrorc.passes.replicas.share_parameters import ShareParameters
from mirrorc.passes.replicas.spread_copies import SpreadCopies
from mirrorc.passes.replicas.update_at_owner import UpdateAtOwner
from mirrorc.passes.updates.check_finite import CheckFinite
from mirrorc.passes.updates.clip_gradients import ClipGradients
from mirrorc.passes.updates.scale_in_updates import ScaleInUpdates
from mirrorc.passes.updates.unscale_gradients import UnscaleGradients
from mirrorc.passes.updates.update_in_parts import UpdateInParts
from mirrorc.passes.workers.compress_exchange import CompressExchange
from mirrorc.passes.workers.reduce_over_workers import ReduceOverWorkers
from mirrorc.passes.workers.send_largest import SendLargest
from mirrorc.passes.workers.send_payload import SendPayload
from mirrorc.passes.workers.shard_optimizer import ShardOptimizer
from mirrorc.passes.workers.worker_compression import WorkerCompression
from mirrorc.pipeline.protocol import Pass

__all__ = [
    "ALGORITHMS", "CACHED", "CENTRAL", "LEAST_LOADED", "PASSES", "AccumulateMicrobatches", "AllReduceAlgorithm",
    "CheckFinite", "ChooseCheckpoints", "ClipGradients", "CompressExchange", "DecomposeGelu", "FactorGradients",
    "InsertAllReduce", "InsertUpdate", "LayChannelsLast", "LowerCollectives", "LowerDevices", "OutlineRegions",
    "PackGradients", "PadProducts", "PlaceGradients", "PlaceVariables", "PlanBuckets", "ReadRowElements",
    "RecomputeCheckpoints", "RecomputeElementwise", "ReduceOverWorkers", "Replicate", "ReserveMemory",
    "ReuseArguments", "ScaleInUpdates", "ScheduleOverlap", "SendLargest", "SendPayload", "SendRows", "ShardOptimizer",
    "ShareParameters", "SpreadCopies", "UnscaleGradients", "UpdateAtOwner", "UpdateInParts", "WorkerCompression",
    "compression_passes", "default_pipeline", "resolve_sharing",
]  # fmt: skip

_IN_ORDER: tuple[Any, ...] = (
    DecomposeGelu, ReadRowElements, RecomputeElementwise, LayChannelsLast, PadProducts, ChooseCheckpoints,
    RecomputeCheckpoints, PlanBuckets, PlaceVariables, OutlineRegions, FactorGradients, PlaceGradients,
    AccumulateMicrobatches, ReuseArguments, ReserveMemory, Replicate, PackGradients, InsertAllReduce, InsertUpdate,
    ScheduleOverlap, ShareParameters, UpdateAtOwner, ReduceOverWorkers, CompressExchange, SendLargest, SendPayload,
    ShardOptimizer, ClipGradients, UnscaleGradients, CheckFinite, SendRows, SpreadCopies, LowerCollectives,
    *ALGORITHMS.values(), ScaleInUpdates, UpdateInParts, LowerDevices,
)  # fmt: skip

PASSES: dict[str, Callable[..., Pass]] = {kind.name: kind for kind in _IN_ORDER}
"""All passes by name, in the order of the pipeline. A pipeline has at most one of the all-reduce algorithms."""


def default_pipeline(
    *,
    buckets: Packing = ByBytes(),
    order: GradientOrder = "ready",
    link: str | None = None,
    algorithm: AllReduceAlgorithm | None = None,
    min_factored_elements: int = 2**17,
    part_elements: int = 2**19,
    gelu_by_sigmoid: bool = False,
    channels_last: bool = False,
    pads_products: bool = False,
    microbatches: int = 1,
    recomputes: bool = False,
    chooses_checkpoints: bool = False,
    reuses_arguments: bool = False,
    reserves_memory: bool = False,
    max_grad_norm: float | tuple[float | None, ...] | None = None,
    grad_norm_type: float | tuple[float, ...] = 2.0,
    max_grad_value: float | None = None,
    scales_loss: bool = False,
    fused_groups: tuple[int, ...] = (),
    check_finite: bool | Literal["skip"] = False,
    over_workers: bool = False,
    early_update: bool = True,
    compression: str | TopK | Payload | None = None,
    shard_optimizer: bool = False,
    placement: str = "auto",
    owners: tuple[tuple[str, str], ...] = (),
) -> list[Pass]:
    """The passes that `mirrorc.compile` runs, in order.

    Args:
        link: see `LowerCollectives`.
        algorithm: None for the link's own all-reduce.
        gelu_by_sigmoid, channels_last, pads_products, recomputes, chooses_checkpoints, reuses_arguments,
            reserves_memory: enable `DecomposeGelu`, `LayChannelsLast`, `PadProducts`, `RecomputeElementwise`,
            `ChooseCheckpoints`, `ReuseArguments` and `ReserveMemory`.
        microbatches: the number of microbatches per shard in the captured program.
        scales_loss: add `UnscaleGradients`, and a `CheckFinite` that skips updates.
        fused_groups: see `ScaleInUpdates`.
        check_finite: add `CheckFinite`; "skip" skips the update, True raises an error.
        over_workers: add `ReduceOverWorkers`, which defines ``early_update``.
        placement: "auto" and "shared" add `ShareParameters`; "mirrored" keeps a copy per device; other values are rules
            of `PlaceVariables`.
    """
    clips = max_grad_norm is not None or max_grad_value is not None
    needing = {"clip_grad_norm": max_grad_norm is not None, "scaler": scales_loss, "check_finite": bool(check_finite)}
    has_owners = placement not in ("auto", "mirrored", "shared")
    needs_all = next((option for option, is_set in needing.items() if is_set), "")
    unscaling: list[Pass] = [UnscaleGradients(), CheckFinite("skip")] if scales_loss else []
    return [
        DecomposeGelu(wanted=gelu_by_sigmoid),
        ReadRowElements(),
        RecomputeElementwise(wanted=recomputes),
        LayChannelsLast(wanted=channels_last),
        *([PadProducts()] if pads_products else []),
        *([ChooseCheckpoints()] if chooses_checkpoints else []),
        RecomputeCheckpoints(),
        PlanBuckets(buckets, order),
        *([PlaceVariables(placement, owners)] if has_owners else []),
        OutlineRegions(),
        FactorGradients(min_elements=min_factored_elements, link=link),
        PlaceGradients(),
        *([AccumulateMicrobatches()] if microbatches > 1 else []),
        ReuseArguments(wanted=reuses_arguments),
        ReserveMemory(wanted=reserves_memory),
        Replicate(),
        PackGradients(),
        InsertAllReduce(),
        InsertUpdate(),
        ScheduleOverlap(),
        *([ShareParameters()] if placement in ("auto", "shared") else []),
        *([UpdateAtOwner()] if has_owners else []),
        *([ReduceOverWorkers(early_update, needs_all)] if over_workers else []),
        *compression_passes(compression),
        *([ShardOptimizer()] if shard_optimizer else []),
        *([ClipGradients(max_grad_norm, grad_norm_type, max_grad_value)] if clips else []),
        *unscaling,
        *([CheckFinite("skip" if check_finite == "skip" else "raise")] if check_finite and not scales_loss else []),
        SendRows(),
        *([SpreadCopies(link=link)] if has_owners else []),
        LowerCollectives(link=link),
        *([algorithm] if algorithm is not None else []),
        *([ScaleInUpdates(fused_groups)] if max_grad_norm is not None or scales_loss else []),
        UpdateInParts(part_elements),
        LowerDevices(),
    ]


def compression_passes(compression: str | TopK | Payload | None) -> list[WorkerCompression]:
    if isinstance(compression, TopK):
        return [SendLargest(**asdict(compression))]
    if isinstance(compression, Payload):
        check_payload(compression)
        return [SendPayload(compression)]
    return [CompressExchange(compression)] if compression is not None else []


def resolve_sharing(passes: Sequence[Pass]) -> list[Pass]:
    """Sets the fields of `FactorGradients` that depend on the other passes."""
    facts: dict[str, Any] = {}
    if not any(isinstance(step, ShareParameters) for step in passes):
        facts["parameters_are_shared"] = False
    if sending := [step.name for step in passes if isinstance(step, AllReduceAlgorithm) and step.sends]:
        facts["all_reduce"] = sending[0]
    return [replace(step, **_open_facts(step, facts)) if isinstance(step, FactorGradients) else step for step in passes]


def _open_facts(factoring: FactorGradients, facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if getattr(factoring, name) is None}
