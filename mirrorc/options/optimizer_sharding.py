"""The option that deals the optimizer's state out to workers, and what cannot be asked for together with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.links import carries_between_workers
from mirrorc.ir.workers import Workers
from mirrorc.packing import may_cut

_PASS = "shard-optimizer"


def sharding(workers: Workers, devices: Sequence[Device], asked: Mapping[str, Any]) -> Workers:
    """The workers of a step, with whether each of them updates a part of each bucket alone.

    Args:
        workers: of the step.
        devices: of this worker.
        asked: the arguments of `mirrorc.compile`, by name.

    Raises:
        ValueError: an option cannot be kept together with it; says why, and the remedy.
    """
    if not asked["shard_optimizer"]:
        return workers
    if asked["passes"] is not None and not any(one.name == _PASS for one in asked["passes"]):
        raise ValueError(
            f"shard_optimizer=True asks for the pass {_PASS!r}, which the pipeline given with passes= has not: put "
            "mirrorc.passes.ShardOptimizer() behind ReduceOverWorkers() there, or leave shard_optimizer out"
        )
    if _PASS in asked["disable_passes"]:
        raise ValueError(
            f"shard_optimizer=True asks for the pass {_PASS!r}, which disable_passes leaves out: leave out one of them"
        )
    if not workers.are_several:
        return workers
    if not carries_between_workers(devices, ops.scatter_sums):
        raise ValueError(
            f"shard_optimizer=True cannot be used on devices of the type {devices[0].torch_device.type!r} yet: what joins "
            "workers there carries no parts of sums; leave it out"
        )
    if not asked["early_update"]:
        raise ValueError(
            "early_update=False cannot be used with shard_optimizer=True yet: workers gather new parameters when they have "
            "committed, so a connection that is lost then leaves parameters between two steps, which early_update=False promises "
            "not to do; leave out one of them"
        )
    if asked["packing"] is not None and may_cut(asked["packing"]):
        raise ValueError(
            "packing= as it is given cannot be used with shard_optimizer=True yet: packs end within gradients, and workers would "
            "get parts of parts; give a plan of whole gradients, or leave out one of them"
        )
    return replace(workers, shards_optimizer=True)
