"""Options for the pass 'plan-buckets', from the arguments that group gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mirrorc.ir.devices import Device
from mirrorc.ir.workers import Workers
from mirrorc.packing import CAP_BETWEEN_HOSTS_MB, ByBytes, check_order, plan_of


def checked_packing(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the pass 'plan-buckets', by name, from the arguments of `mirrorc.compile`.

    Raises:
        TypeError, ValueError: an argument is no plan or no order, or ``packing`` is given beside a bucket size.
    """
    packing, order, cap, first = (
        asked[option] for option in ("packing", "gradient_order", "bucket_cap_mb", "first_bucket_mb")
    )
    check_order(order)
    if packing is not None:
        packing = plan_of(packing)
        if cap is not None or first is not None:
            raise ValueError(
                "packing= is given besides bucket_cap_mb= or first_bucket_mb=, the short form of packing=mirrorc.packing.ByBytes("
                "cap_mb, first_mb): give one of both"
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
    """Adds `mirrorc.packing.CAP_BETWEEN_HOSTS_MB`, the default cap between hosts, to the options of `checked_packing`.

    It applies to several workers on CPUs, if no cap or plan is given.
    """
    is_open = asked["bucket_cap_mb"] is None and not {"bucket_cap_mb", "packing"} & planned.keys()
    are_cpus = all(device.torch_device.type == "cpu" for device in devices)
    if is_open and program_workers.are_several and are_cpus:
        return {**planned, "bucket_cap_mb": CAP_BETWEEN_HOSTS_MB}
    return dict(planned)
