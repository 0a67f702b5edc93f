"""The table of the options of `mirrorc.compile`, with the kinds, passes and exclusions of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from numbers import Real
from types import NoneType
from typing import Any, Literal, get_args

import torch

from mirrorc.compression import Payload, TopK
from mirrorc.ir import ops, workers
from mirrorc.ir.links import carries_between_workers, why_memory_is_not_shared, why_no_factors_for_workers
from mirrorc.options.all_reduce import algorithm_of
from mirrorc.options.option import Exclusion, NeededPasses, Option, Options, Request
from mirrorc.options.tf_communication import with_communication_options
from mirrorc.packing import may_cut
from mirrorc.passes import FactorGradients, compression_passes
from mirrorc.runtime.state.optimizers.loss_scale import is_in_use

LossReduction = Literal["mean", "sum"]
Auto = Literal["auto"]

# Backends, links and front ends from outside of the package may have any name; these are the package's own.
BackendName = Literal["inductor", "eager"] | str
LinkName = Literal["shared-memory", "nccl", "copy"] | str
FrontEndName = Literal["auto", "dynamo", "autograd"] | str
FiniteCheck = bool | Literal["skip"]
WorkersOption = Auto | None
Exchange = Literal["auto", "dense", "factors"]
Compression = Literal["bfloat16", "float16"]
PlacementName = Literal["auto", "mirrored", "shared", "central", "least-loaded", "cached"]

_OVER_WORKERS = "over several workers"
_ON_DEVICES = "on devices of the type {request.device_type!r} yet"
_LEAVE_OUT = "leave it out"


def _over_workers(why: str) -> Callable[[Request], str]:
    return lambda request: why if request.workers.are_several else ""


def _is_real(least: float, *, is_open: bool = False) -> Callable[[Any], bool]:
    return lambda value: value > least if is_open else value >= least


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


def _packs_cut_gradients(request: Request) -> bool:
    return request["packing"] is not None and may_cut(request["packing"])


def _compression_pass(request: Request) -> Any:
    (entry,) = compression_passes(request["compression"])
    return entry


def _uses_float16_parameters(request: Request) -> str:
    parameters = request.asked["model"].named_parameters()
    name = next((name for name, p in parameters if p.requires_grad and p.dtype == torch.float16), None)
    if name is None:
        return ""
    return f"gradients are divided by the scale, for which 16 bits are too few, and the parameter {name!r} is float16"


def _finite_check_in_a_graph(request: Request) -> str:
    if not any(entry.name == "check-finite" for entry in request.pipeline):
        return ""
    return "the host looks at what is finite in every step, before anything is written, and a graph runs without it"


def _no_factors(request: Request) -> str:
    if request["exchange"] != "factors" or any(isinstance(entry, FactorGradients) for entry in request.pipeline):
        return ""
    return "the pass 'factor-gradients' is not in it (exact_order=True leaves it out, too)"


def _unlike_workers(request: Request) -> str:
    several = request.workers
    if request["exchange"] != "factors" or not several.are_several or several.are_alike or request["shard_optimizer"]:
        return ""
    return "workers that have different numbers of devices would make other bits of one product"


def _no_factors_for_workers(request: Request) -> str:
    if request["exchange"] != "factors" or not request.workers.are_several:
        return ""
    return why_no_factors_for_workers(request["link"], request.devices)


def _names(option: str) -> Option:
    return Option(option, "give a sequence of names, such as ('replicate',)", (), kinds=(Sequence, Set))


_SIZE_PASSES = NeededPasses((), "give mirrorc.passes.PlanBuckets its numbers there")
_CLIP_PASSES = NeededPasses(("clip-gradients",), "put mirrorc.passes.ClipGradients() there, after ShareParameters")

OPTIONS = Options(
    [
        Option("optimizer"),
        Option("loss_fn", "give a function loss_fn(output, target)", kinds=(Callable, NoneType)),
        Option(
            "loss_reduction",
            "say 'mean' or 'sum', as the loss does over its examples",
            "mean",
            kinds=(),
            texts=get_args(LossReduction),
        ),
        Option("backend", default="inductor"),
        Option("dump", "give the path of a directory, or None", kinds=(str, os.PathLike, NoneType)),
        _names("print_after"),
        Option(
            "print_after_all", "say True, to print the program after each pass, or False", default=False, kinds=(bool,)
        ),
        Option(
            "passes",
            "give a list of passes, or None for mirrorc.passes.default_pipeline()",
            kinds=(Sequence, NoneType),
        ),
        Option("add_passes", "give a list, such as [mirrorc.after('pack-gradients', it)]", (), kinds=(Sequence,)),
        _names("disable_passes"),
        Option(
            "bucket_cap_mb",
            "give a positive number of MiB (math.inf for one bucket), or None for the default",
            kinds=(Real, NoneType),
            passes=_SIZE_PASSES,
        ),
        Option(
            "first_bucket_mb",
            "give a positive number of MiB, or None for the default",
            kinds=(Real, NoneType),
            passes=_SIZE_PASSES,
        ),
        Option(
            "packing",
            passes=NeededPasses(("plan-buckets",), "give mirrorc.passes.PlanBuckets its packing there"),
        ),
        Option(
            "gradient_order",
            default="ready",
            passes=NeededPasses(("plan-buckets",), "give mirrorc.passes.PlanBuckets its gradient_order there"),
        ),
        Option(
            "link",
            passes=NeededPasses(
                (),
                "put mirrorc.passes.LowerCollectives(link={value}) there, and give it to FactorGradients and SpreadCopies, too",
            ),
        ),
        Option(
            "all_reduce",
            default="native",
            passes=NeededPasses(
                lambda value: [algorithm_of(value).name],
                lambda value: (
                    f"put mirrorc.all_reduce_algorithms.{type(algorithm_of(value)).__name__}() behind LowerCollectives() "
                    "there"
                ),
            ),
        ),
        Option("communication_options"),
        Option("exact_order", "say True, to leave out passes that change bits, or False", default=False, kinds=(bool,)),
        Option("capture", default="auto"),
        Option(
            "timeout_seconds",
            "give a positive number of seconds (math.inf for no bound)",
            1800.0,
            kinds=(Real,),
            accepts=_is_real(0, is_open=True),
        ),
        Option("record", "say True, for step.explain() and step.timeline(), or False", True, kinds=(bool,)),
        Option(
            "cuda_graphs",
            "say True, for one GPU, or False",
            default=False,
            kinds=(bool,),
            excludes=(
                Exclusion(
                    f"{_OVER_WORKERS} yet", _over_workers("a graph does not replay what joins workers"), _LEAVE_OUT
                ),
                Exclusion(
                    "on {request.device_names}",
                    lambda r: "" if r.device_type == "cuda" else "a graph is of a GPU",
                    _LEAVE_OUT,
                ),
                Exclusion(
                    "on {request.device_names}",
                    lambda r: (
                        "" if len(r.devices) == 1 else "devices wait for one another in Python between their calls"
                    ),
                    "leave it out, or name one GPU",
                ),
                Exclusion("check_finite", _finite_check_in_a_graph, needs_pipeline=True),
            ),
        ),
        Option("return_outputs", "say True, for loss, outputs = step(...), or False", default=False, kinds=(bool,)),
        Option(
            "microbatches",
            "give a number of parts, 1 to run each shard at once",
            1,
            kinds=(int,),
            accepts=_is_real(1),
            passes=NeededPasses(
                ("accumulate-microbatches",),
                "put mirrorc.passes.AccumulateMicrobatches() there, before Replicate",
                may_be_in_passes=True,
            ),
        ),
        Option(
            "activation_memory",
            "give a positive number of bytes for each device as an int, a part of what activations would take as a float, more "
            "than 0 and at most 1.0, or None",
            kinds=(int, float, NoneType),
            accepts=lambda bound: 0 < bound <= 1 if isinstance(bound, float) else bound >= 1,
            passes=NeededPasses(
                ("choose-checkpoints", "recompute-checkpoints"),
                "put mirrorc.passes.ChooseCheckpoints() there, before RecomputeCheckpoints",
                may_be_in_passes=True,
            ),
        ),
        Option(
            "progress",
            "say True, to be told what takes long while it is compiled, or False",
            True,
            kinds=(bool,),
        ),
        Option("autocast"),
        Option(
            "scaler",
            "give a torch.amp.GradScaler, or None",
            kinds=(torch.amp.GradScaler, NoneType),
            passes=NeededPasses(("unscale-gradients", "check-finite"), "leave passes out"),
            excludes=(
                Exclusion(
                    "by two steps",
                    lambda r: "each counts and changes its scale as update() does" if is_in_use(r["scaler"]) else "",
                    "give each step a GradScaler of its own, close() the other step, or train both optimizers in one step, "
                    "optimizer=[first, second]",
                ),
                Exclusion(
                    "check_finite",
                    "the scaler skips each step whose gradients are not finite, and check_finite says "
                    "what happens to such a step, too",
                ),
                Exclusion("cuda_graphs", "the host looks at what is finite in every step, and a graph runs without it"),
                Exclusion(
                    "with a model in float16",
                    _uses_float16_parameters,
                    "keep parameters in float32 and compute in float16 by autocast=torch.float16 (torch's GradScaler refuses "
                    "them, too)",
                ),
            ),
        ),
        Option("clip_grad_norm", passes=_CLIP_PASSES),
        Option("clip_grad_value", passes=_CLIP_PASSES),
        Option(
            "check_finite",
            "say True, to raise an error where a loss or gradient is not finite, 'skip', to leave such updates out, or False",
            False,
            kinds=(bool,),
            texts=("skip",),
            passes=NeededPasses(("check-finite",), "put mirrorc.passes.CheckFinite() there, after ShareParameters"),
        ),
        Option(
            "check_replicas_every",
            "give a positive number of steps, or 0 for never",
            kinds=(int, NoneType),
            accepts=_is_real(0),
        ),
        Option(
            "example_inputs",
            "give a tuple of positional arguments, a dict of keyword arguments, or a pair of both",
            kinds=(tuple, dict, NoneType),
        ),
        Option(
            "workers", "say 'auto', or None, to train in this process alone", "auto", kinds=(NoneType,), texts=("auto",)
        ),
        Option("process_group"),
        Option(
            "world",
            "give a mirrorc.World, such as World(num_workers=2), or None",
            kinds=(workers.World, NoneType),
        ),
        Option("rank", "give the number of a worker of world=, or None for worker 0", kinds=(int, NoneType)),
        Option(
            "exchange",
            "say 'dense', to send all gradients whole, 'factors', to send the factors of those that have some, or 'auto'",
            "auto",
            kinds=(),
            texts=get_args(Exchange),
            excludes=(
                Exclusion("with this pipeline", _no_factors, "put it in, or give exchange='auto'", needs_pipeline=True),
                Exclusion(
                    "over workers that have different numbers of devices",
                    _unlike_workers,
                    "give all workers the same number, or exchange='auto', or let each make its part alone with "
                    "shard_optimizer=True",
                ),
                Exclusion("on {request.device_names}", _no_factors_for_workers, "give exchange='auto'"),
            ),
        ),
        Option(
            "early_update",
            "say True, to update each bucket when its own sum is there, or False",
            True,
            kinds=(bool,),
            passes=NeededPasses((), "put mirrorc.passes.ReduceOverWorkers(early_update={value}) there"),
            excludes=(
                Exclusion(
                    "shard_optimizer",
                    lambda r: (
                        "workers gather new parameters when they have committed, so a connection that is lost then leaves "
                        "parameters between two steps, which early_update=False promises not to do"
                        if r["shard_optimizer"] and r.workers.are_several
                        else ""
                    ),
                ),
            ),
        ),
        Option(
            "compression",
            "say 'bfloat16' or 'float16', to send sums to other workers so, mirrorc.TopK(ratio), to send a part of them, "
            "a mirrorc.compression.Payload of your own, or None for all in their own "
            "dtype",
            kinds=(Payload, TopK, NoneType),
            texts=get_args(Compression),
            passes=NeededPasses(
                lambda value: [entry.name for entry in compression_passes(value)],
                lambda value: f"put mirrorc.passes.{compression_passes(value)[0]!r} behind ReduceOverWorkers() there",
            ),
            excludes=(
                Exclusion("exact_order", lambda r: _compression_pass(r).changes_bits if r["exact_order"] else ""),
                Exclusion(
                    _ON_DEVICES,
                    lambda r: (
                        "compressed sums have not been tried there"
                        if r.workers.are_several and r.device_type != "cpu"
                        else ""
                    ),
                    _LEAVE_OUT,
                ),
                Exclusion(
                    "shard_optimizer",
                    lambda r: (
                        "workers send each other parts of sums there, which are not compressed yet"
                        if r.workers.are_several and r["shard_optimizer"]
                        else ""
                    ),
                ),
            ),
        ),
        Option(
            "shard_optimizer",
            "say True, to deal the optimizer's state out to the workers, or False",
            default=False,
            kinds=(bool,),
            passes=NeededPasses(
                ("shard-optimizer",),
                "put mirrorc.passes.ShardOptimizer() behind ReduceOverWorkers() there",
                may_be_in_passes=True,
            ),
            excludes=(
                Exclusion(
                    _ON_DEVICES,
                    lambda r: (
                        "what joins workers there carries no parts of sums"
                        if r.workers.are_several and not carries_between_workers(r.devices, ops.scatter_sums)
                        else ""
                    ),
                    _LEAVE_OUT,
                ),
                Exclusion(
                    "packing",
                    lambda r: (
                        "packs end within gradients, and workers would get parts of parts"
                        if r.workers.are_several and _packs_cut_gradients(r)
                        else ""
                    ),
                    "give a plan of whole gradients, or leave out one of them",
                ),
            ),
        ),
        Option(
            "placement",
            "say 'auto', 'mirrored', 'shared', 'central', 'least-loaded' or 'cached', or give a dict with the owners of "
            "parameters, such as {'embedding.weight': 'cpu:0', '*': 'least-loaded'}",
            "auto",
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
                    "leave it out, or give each worker one device",
                ),
                Exclusion(
                    _OVER_WORKERS,
                    _owners_over_workers,
                    "use shard_optimizer=True, which deals the update out to workers, and leave placement out",
                ),
                Exclusion(
                    "packing",
                    lambda r: (
                        "packs end within gradients there, whose parts would go to owners apart"
                        if _names_owners(r["placement"]) and _packs_cut_gradients(r)
                        else ""
                    ),
                    "give a plan of whole gradients",
                ),
            ),
        ),
        Option(
            "dynamic",
            "say False, to compile each new size, None, for symbols in place of sizes that change, or True, for symbols from "
            "the first call on",
            False,
            kinds=(bool, NoneType),
        ),
    ],
    withdrawn={
        "overlap_next_step": "it gained nothing on any machine where it was measured; leave it out",
    },
)


def checked_arguments(asked: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """The checked arguments of `mirrorc.compile`, with those of declared options and ``communication_options``.

    Raises:
        TypeError, ValueError: an argument is no option, or its value is not allowed.
    """
    asked = OPTIONS.with_declared(asked, declared)
    for (option, value), why in _WITHDRAWN_VALUES.items():
        if isinstance(asked[option], str) and asked[option] == value:
            raise ValueError(f"{option}={value!r} was withdrawn: {why}")
    OPTIONS.check_kinds(asked)
    return with_communication_options(asked, OPTIONS.defaults)


_WITHDRAWN_VALUES = {
    (
        "bucket_cap_mb",
        "auto",
    ): "sizes chosen by measurement were at most 0.7% faster than the default; leave it out, or give a number of MiB",
    ("capture", "trace"): "models that it took train with capture='autograd', which 'auto' falls back to",
}
