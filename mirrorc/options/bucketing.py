"""The bucket plan for ``buckets`` of `mirrorc.Communication`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mirrorc.ir.devices import Device
from mirrorc.ir.workers import Workers
from mirrorc.packing import CAP_BETWEEN_HOSTS_MB, ByBytes, Plan, plan_of


def planned_buckets(buckets: Any, workers: Workers, devices: Sequence[Device]) -> Plan:
    """With "auto", caps depend on the connection: between hosts for several workers on CPUs, else within a host."""
    if buckets != "auto":
        return plan_of(buckets)
    are_cpus = all(device.torch_device.type == "cpu" for device in devices)
    return ByBytes(CAP_BETWEEN_HOSTS_MB) if workers.are_several and are_cpus else ByBytes()
