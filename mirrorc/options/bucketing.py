"""Checks of the arguments that say how gradients are grouped, and what follows from them for the pass 'plan-buckets'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mirrorc.ir.devices import Device
from mirrorc.ir.workers import Workers
from mirrorc.packing import CAP_BETWEEN_HOSTS_MB, ByBytes, check_order, plan_of


def refuse_measured_sizes(bucket_cap_mb: Any) -> None:
    """Refuses "auto" as a bucket size, which earlier versions chose by measurement.

    Raises:
        ValueError: says what to give instead.
    """
    if isinstance(bucket_cap_mb, str) and bucket_cap_mb == "auto":
        raise ValueError(
            "bucket_cap_mb='auto' is withdrawn, as measured sizes gained nothing over the default: leave it out for the default "
            f"of {ByBytes.cap_mb:g} MiB ({CAP_BETWEEN_HOSTS_MB:g} over several workers on CPUs), or give a number of MiB"
        )


def checked_packing(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the pass 'plan-buckets' that follow from the arguments of `mirrorc.compile`, by name.

    Raises:
        TypeError, ValueError: what is given is no plan or no order, or contradicts another option; names it and the remedy.
    """
    packing, order, cap, first = (
        asked[option] for option in ("packing", "gradient_order", "bucket_cap_mb", "first_bucket_mb")
    )
    check_order(order)
    given = ["gradient_order"] if order != "ready" else []
    if packing is not None:
        packing = plan_of(packing)
        given.append("packing")
        if cap is not None or first is not None:
            raise ValueError(
                "packing= is given besides bucket_cap_mb= or first_bucket_mb=, the short form of packing=mirrorc.packing.ByBytes("
                "cap_mb, first_mb): give one of both"
            )
    for option in given:
        if "plan-buckets" in asked["disable_passes"]:
            raise ValueError(
                f"{option}= is for the pass 'plan-buckets', which disable_passes leaves out: leave out one of them"
            )
    chosen: dict[str, Any] = {} if order == "ready" else {"gradient_order": order}
    if isinstance(packing, ByBytes):
        return {**chosen, "bucket_cap_mb": packing.cap_mb, "first_bucket_mb": packing.first_mb}
    chosen |= {} if cap is None or packing is not None else {"bucket_cap_mb": cap}
    chosen |= {} if first is None else {"first_bucket_mb": first}
    return chosen if packing is None else {**chosen, "packing": packing}


def with_default_cap(
    planned: Mapping[str, Any], program_workers: Workers, devices: Sequence[Device], asked: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of `checked_packing`, with the cap of buckets between hosts (`mirrorc.packing.CAP_BETWEEN_HOSTS_MB`) if they
    are planned by bytes and ``asked``, the arguments of `mirrorc.compile`, gives none. Devices that are no CPUs keep that of
    `mirrorc.packing.ByBytes`, which suits the links that they have.
    """
    is_open = asked["bucket_cap_mb"] is None and not {"bucket_cap_mb", "packing"} & planned.keys()
    are_cpus = all(device.torch_device.type == "cpu" for device in devices)
    if is_open and program_workers.are_several and are_cpus:
        return {**planned, "bucket_cap_mb": CAP_BETWEEN_HOSTS_MB}
    return dict(planned)
