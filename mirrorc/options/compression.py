"""The option that has workers send sums in a narrower dtype, a part of them, or factors, and what cannot be asked for with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mirrorc.ir.devices import Device
from mirrorc.ir.workers import Workers
from mirrorc.passes import compressing


def check_compression(workers: Workers, devices: Sequence[Device], asked: Mapping[str, Any]) -> None:
    """Refuses options that cannot be kept together with ``compression``. One worker on its own sends nothing, as a remark says.

    Args:
        workers: of the step.
        devices: of this worker.
        asked: the arguments of `mirrorc.compile`, by name.

    Raises:
        ValueError: says which, why, and the remedy.
    """
    compression = asked["compression"]
    if compression is None:
        return
    (one,) = compressing(compression)
    if asked["passes"] is not None:
        raise ValueError(
            f"compression={compression!r} has no part in a pipeline given with passes=: put "
            f"mirrorc.passes.{one!r} behind ReduceOverWorkers() there, or leave compression out"
        )
    if one.name in asked["disable_passes"]:
        raise ValueError(
            f"compression={compression!r} asks for the pass {one.name!r}, which disable_passes leaves out: leave out one of them"
        )
    if asked["exact_order"]:
        raise ValueError(
            f"compression={compression!r} cannot be used with exact_order=True: {one.changes_bits}; leave out one of them"
        )
    if not workers.are_several:
        return
    if devices[0].torch_device.type != "cpu":
        raise ValueError(
            f"compression={compression!r} cannot be used on devices of the type {devices[0].torch_device.type!r} yet: what is "
            "sent there in another form has not been tried; leave it out"
        )
    if asked["shard_optimizer"]:
        raise ValueError(
            f"compression={compression!r} cannot be used with shard_optimizer=True yet: workers send each other parts of sums "
            "there, which are not compressed; leave out one of them"
        )
