"""The option that lets the next step begin while buckets of the last one are in flight, and what cannot be asked for with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import torch

from mirrorc.ir.devices import Device
from mirrorc.ir.workers import Workers
from mirrorc.packing import ByBytes

_PASS = "overlap-next-step"


def check_overlap(workers: Workers, devices: Sequence[Device], asked: Mapping[str, Any]) -> None:
    """Refuses options that cannot be kept together with ``overlap_next_step``. One worker on its own has nothing in flight, which
    a remark says.

    Args:
        workers: of the step.
        devices: of this worker.
        asked: the arguments of `mirrorc.compile`, by name.

    Raises:
        ValueError: says which, why, and the remedy.
    """
    if not asked["overlap_next_step"]:
        return
    if asked["passes"] is not None and not any(one.name == _PASS for one in asked["passes"]):
        raise ValueError(
            f"overlap_next_step=True asks for the pass {_PASS!r}, which the pipeline given with passes= has not: put "
            "mirrorc.passes.OverlapNextStep() behind ReduceOverWorkers() there, or leave overlap_next_step out"
        )
    if _PASS in asked["disable_passes"]:
        raise ValueError(
            f"overlap_next_step=True asks for the pass {_PASS!r}, which disable_passes leaves out: leave out one of them"
        )
    if not workers.are_several:
        return
    if devices[0].torch_device.type != "cpu":
        raise ValueError(
            f"overlap_next_step=True cannot be used on devices of the type {devices[0].torch_device.type!r} yet: what is in "
            "flight there has not been tried between two steps; leave it out"
        )
    all_sums = "it needs all sums before the first update, so that nothing is in flight when a step returns"
    scaler = asked["scaler"]
    reasons = {
        "early_update": (not asked["early_update"], "no bucket is updated before all sums are there then"),
        "clip_grad_norm": (asked["clip_grad_norm"] is not None, all_sums),
        "scaler": (scaler is not None and scaler.is_enabled(), all_sums),
        "check_finite": (bool(asked["check_finite"]), all_sums),
        "optimizer": (
            _has_tensors(asked.get("optimizer")),
            "a hyperparameter of it is a tensor, which a scheduler writes in place while updates of the last step still need it",
        ),
        "check_replicas_every": (bool(asked["check_replicas_every"]), "it reads all parameters before a step begins"),
        "packing": (
            not isinstance(asked["packing"], ByBytes | NoneType),
            "the last buckets are planned by bytes, in the order in which forward reads their parameters",
        ),
        "gradient_order": (
            asked["gradient_order"] != "ready",
            "gradients of the last buckets lie in the order in which forward reads their parameters",
        ),
    }
    for option, (is_asked, why) in reasons.items():
        if is_asked:
            raise ValueError(
                f"{option}= as it is given cannot be used with overlap_next_step=True: {why}; leave out one of them"
            )


def plan_of_next_step(workers: Workers) -> dict[str, bool]:
    """The options of `mirrorc.passes.default_pipeline` by which the plan of buckets keeps the bits of steps that wait.

    Two workers add up each element alike, wherever it lies. More add it up in an order that depends on its place in its bucket,
    so their buckets stay. Several devices of a worker make large gradients from gathered factors, but none that is cut.
    """
    is_pair = workers.num_workers <= 2
    return {
        "plans_for_next_step": is_pair,
        "packs_for_next_step": is_pair and set(workers.devices_per_worker) == {1},
    }


def why_not_by_need(workers: Workers, preferred: Mapping[str, Any]) -> str:
    """Why buckets are planned as for steps that wait, though forward is cut for steps that return early; empty if they are not.

    Args:
        workers: of the step.
        preferred: the options of `mirrorc.passes.default_pipeline` that its backend prefers.
    """
    if not preferred.get("cuts_for_next_step", True) or plan_of_next_step(workers)["plans_for_next_step"]:
        return ""
    return (
        f"overlap_next_step: buckets are planned as without it: {workers.num_workers} workers add up an element in an order that "
        "depends on its place in its bucket, so the last bits would differ (passes=mirrorc.passes.default_pipeline("
        "over_workers=True, overlap_next_step=True) plans them in the order in which forward reads their parameters)"
    )


def _has_tensors(given: Any) -> bool:
    """Whether a hyperparameter of an optimizer, or of several, is a tensor."""
    optimizers = given if isinstance(given, Sequence) else [given]
    groups = [group for one in optimizers for group in getattr(one, "param_groups", ())]
    return any(isinstance(value, torch.Tensor) for group in groups for value in group.values())
