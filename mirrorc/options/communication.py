"""`Communication`: how gradients are exchanged between devices and between workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from numbers import Real
from types import NoneType
from typing import Any, ClassVar, Literal, get_args

from mirrorc.cluster.bounded_calls import seconds_of
from mirrorc.compression import Payload, TopK
from mirrorc.ir import ops
from mirrorc.ir.links import best_link, carrier_of, link_named, link_names, why_no_factors_for_workers
from mirrorc.messages.problem import problem, with_line
from mirrorc.options.option import Exclusion, NeededPasses, OptionGroup, Request, option
from mirrorc.packing import CAP_BETWEEN_HOSTS_MB, ByBytes, GradientOrder, Packing, Plan, check_order, may_cut, plan_of
from mirrorc.passes import FactorGradients, compression_passes
from mirrorc.passes.all_reduce import ALGORITHMS, AllReduceAlgorithm
from mirrorc.passes.all_reduce.auto import Auto
from mirrorc.pipeline.pipeline_text import parse_passes

# A link from outside of the package may have any name; these are the package's own.
LinkName = Literal["shared-memory", "nccl", "copy"] | str
Exchange = Literal["auto", "dense", "factors"]
Compression = Literal["bfloat16", "float16"]


def packs_cut_gradients(request: Request) -> bool:
    return request["buckets"] != "auto" and may_cut(request["buckets"])


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


def _parameters_between_steps(request: Request) -> str:
    if not (request["shard_optimizer"] and request.workers.are_several):
        return ""
    return (
        "workers gather new parameters when they have committed, so a connection that is lost then leaves parameters between "
        "two steps, which early_update=False promises not to do"
    )


def _changes_bits(request: Request) -> Any:
    (entry,) = compression_passes(request["compression"])
    return entry.changes_bits if request["exact_order"] else ""


def _untried_devices(request: Request) -> str:
    is_untried = request.workers.are_several and request.device_type != "cpu"
    return "compressed sums have not been tried there" if is_untried else ""


def _parts_of_sums(request: Request) -> str:
    if not (request.workers.are_several and request["shard_optimizer"]):
        return ""
    return "workers send each other parts of sums there, which are not compressed yet"


def _in_plan_buckets(argument: str) -> NeededPasses:
    return NeededPasses(("plan-buckets",), f"give mirrorc.passes.PlanBuckets its {argument} there")


def algorithm_of(algorithm: Any) -> AllReduceAlgorithm:
    """The algorithm of a name, which may have options: ``"reduce-to-one{device=1}"``; or the argument, if it is one."""
    if isinstance(algorithm, AllReduceAlgorithm):
        return algorithm
    fix = (
        f"give one of {', '.join(map(repr, ALGORITHMS))}",
        "give an object of mirrorc.all_reduce_algorithms, such as ReduceToOne(device=1)",
    )
    if not isinstance(algorithm, str):
        raise problem(TypeError, f"MC1001: algorithm is {algorithm!r}, which is no algorithm", fix=fix)
    name = algorithm.partition("{")[0].strip()
    if name in link_names():
        raise problem(
            ValueError,
            f"MC1002: algorithm is {algorithm!r}, which is a link and not an algorithm",
            fix=(f"communication=mirrorc.Communication(link={algorithm!r})", *fix),
        )
    if name not in ALGORITHMS and ":" not in name:
        raise problem(ValueError, f"MC1002: algorithm is {algorithm!r}, which is no algorithm", fix=fix)
    try:
        made = parse_passes(algorithm, ALGORITHMS)
    except ValueError as error:
        raise problem(ValueError, f"MC1002: algorithm is {algorithm!r}", str(error), fix) from error
    if len(made) != 1 or not isinstance(made[0], AllReduceAlgorithm):
        raise problem(ValueError, f"MC1002: algorithm is {algorithm!r}, which is not one algorithm", fix=fix)
    return made[0]


@dataclass(frozen=True, kw_only=True)
class Communication(OptionGroup):
    """How gradients are exchanged, for ``communication=`` of `mirrorc.compile`.

    Attributes:
        buckets: the gradients that are reduced together. A number is the cap of a bucket in MiB: ``buckets=8.0`` is
            short for ``mirrorc.packing.ByBytes(8.0)``, which also has the cap of the first bucket; ``math.inf`` is one
            bucket. Other plans are `mirrorc.packing.EqualPacks`, `EqualSplits`, and functions from a list of
            `mirrorc.packing.Gradient` to groups of their names. "auto" is ``ByBytes()``; over several workers on CPUs,
            ``ByBytes(4.0)``, because less is then unsent at the end of backward.
        order: the order of gradients in buckets: "ready" as backward computes them, "reversed" against the model's
            order of parameters, or a key function of a `mirrorc.packing.Gradient`. Buckets are always reduced as they
            become ready.
        algorithm: the all-reduce algorithm for devices: "native" is the link's own; "reduce-to-one",
            "hierarchical-copy", "ring", "halving-doubling", "tree" and "round-robin" send messages between devices;
            "auto" chooses for each bucket, with a remark on the reason. With options: ``"reduce-to-one{device=1}"``, or
            an object of `mirrorc.all_reduce_algorithms`.
        link: the transport between devices, "shared-memory", "nccl" or "copy"; None for the fastest one that joins
            them.
        exchange: the form of gradients between workers, or between devices that do not share parameters. "dense" sends
            whole buckets. "factors" sends the factors of gradients that have some (the two matrices of a linear layer's
            product, rows and indices of a table); each receiver computes the sum, or its share, from them. "auto"
            chooses for each gradient: the least time at the first call, or fewer bytes between devices. If nothing is
            sent, a remark says that it has no effect.
        compression: over several workers, send sums of gradients as "bfloat16" or "float16", half the bytes of float32;
            this changes numbers. A worker's devices first add up in the gradients' dtype; the sum over workers is cast
            back before norms, bounds and updates. Factors are sent unchanged. A remark has the bytes with and without
            compression. With `mirrorc.TopK`, each worker sends the largest elements of its sum; with a
            `mirrorc.compression.Payload` of your own, its message. The rest is added in the next step (error feedback);
            `Step.state_dict` includes it.
        early_update: over several workers, update each bucket when its sum arrives, while others are in flight. If a
            connection is lost then, parameters are partly updated, and cannot be used until model and optimizer are
            restored. False commits when all sums have arrived, so a failure never leaves parameters partly updated.
        process_group: a group of `torch.distributed` with all workers; by default, the default group.
        timeout: the longest wait of a device for another one, in seconds or as a `datetime.timedelta`; may be
            ``math.inf``.

    Raises:
        TypeError, ValueError: a field has another kind or value; names it and the remedy.
    """

    keyword: ClassVar[str] = "communication"

    buckets: Packing | Literal["auto"] = option("auto", passes=_in_plan_buckets("buckets"))
    order: GradientOrder = option("ready", passes=_in_plan_buckets("order"))
    algorithm: str | AllReduceAlgorithm = option(
        "native",
        passes=NeededPasses(
            lambda value: [algorithm_of(value).name],
            lambda value: (
                f"put mirrorc.all_reduce_algorithms.{type(algorithm_of(value)).__name__}() behind LowerCollectives() there"
            ),
        ),
    )
    link: LinkName | None = option(
        None,
        passes=NeededPasses(
            (),
            "put mirrorc.passes.LowerCollectives(link={value}) there, and give it to FactorGradients and SpreadCopies, too",
        ),
    )
    exchange: Exchange = option(
        "auto",
        "say 'dense', to send all gradients whole, 'factors', to send the factors of those that have some, or 'auto'",
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
    )
    compression: Compression | TopK | Payload | None = option(
        None,
        "say 'bfloat16' or 'float16', to send sums to other workers so, mirrorc.TopK(ratio), to send a part of them, "
        "a mirrorc.compression.Payload of your own, or None for all in their own dtype",
        kinds=(Payload, TopK, NoneType),
        texts=get_args(Compression),
        passes=NeededPasses(
            lambda value: [entry.name for entry in compression_passes(value)],
            lambda value: f"put mirrorc.passes.{compression_passes(value)[0]!r} behind ReduceOverWorkers() there",
        ),
        excludes=(
            Exclusion("exact_order", _changes_bits),
            Exclusion("on devices of the type {request.device_type!r} yet", _untried_devices),
            Exclusion("shard_optimizer", _parts_of_sums),
        ),
    )
    early_update: bool = option(
        True,
        "say True, to update each bucket when its own sum is there, or False",
        kinds=(bool,),
        passes=NeededPasses((), "put mirrorc.passes.ReduceOverWorkers(early_update={value}) there"),
        excludes=(Exclusion("shard_optimizer", _parameters_between_steps),),
    )
    process_group: Any = option(None)
    timeout: float | timedelta = option(
        1800.0,
        "give a positive number of seconds (math.inf for no bound), or a datetime.timedelta",
        kinds=(Real, timedelta),
        accepts=lambda timeout: seconds_of(timeout) > 0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.buckets, str) or self.buckets != "auto":
            plan_of(self.buckets)
        check_order(self.order)
        algorithm_of(self.algorithm)
        if self.link is not None:
            link_named(self.link)


def planned_buckets(request: Request) -> Plan:
    """With "auto", caps depend on the connection: between hosts for several workers on CPUs, else within a host."""
    if request["buckets"] != "auto":
        return plan_of(request["buckets"])
    are_between_hosts = request.workers.are_several and request.device_type == "cpu"
    return ByBytes(CAP_BETWEEN_HOSTS_MB) if are_between_hosts else ByBytes()


def checked_algorithm(request: Request) -> AllReduceAlgorithm | None:
    """The all-reduce algorithm for devices; None for the link's own."""
    workers, devices, asked = request.workers, request.devices, request.asked
    algorithm = algorithm_of(asked["algorithm"])
    if objection := algorithm.objection(len(devices)):
        fix = "leave algorithm= out: 'native' fits all devices"
        raise problem(
            ValueError, f"MC1503: algorithm={algorithm.name!r} cannot be used on {request.device_names}", objection, fix
        )
    if algorithm.name == "native":
        return None
    if asked["exact_order"] and isinstance(algorithm, Auto):
        algorithm = replace(algorithm, exact_order=True)
    name = algorithm.name
    if asked["exact_order"] and algorithm.changes_bits:
        raise problem(
            ValueError,
            f"MC1003: algorithm={name!r} as it is given cannot be used with exact_order=True",
            algorithm.changes_bits,
            (
                "algorithm='reduce-to-one' or 'round-robin', which add up in the order of replicas",
                "leave exact_order= out",
            ),
        )
    if algorithm.sends and asked["placement"] not in ("auto", "mirrored", "shared"):
        raise problem(
            ValueError,
            f"MC1003: algorithm={name!r} cannot be used with placement={asked['placement']!r}",
            "with a placement, each gradient is reduced to the owner of its parameter alone",
            ("leave algorithm= out", "leave placement= out"),
        )
    if workers.are_several and algorithm.sends:
        why = "it sums among the devices of one process; over workers gloo or NCCL sums"
        fix = "leave algorithm= out"
        raise problem(ValueError, f"MC1003: algorithm={name!r} cannot be used over several workers", why, fix)
    if algorithm.sends and len(devices) > 1:
        link = asked["link"] or best_link(devices)[0]
        try:
            carrier_of(link, ops.send)
        except ValueError as error:
            raise ValueError(with_line(str(error), "why", f"algorithm={name!r} needs sends")) from error
    return algorithm
