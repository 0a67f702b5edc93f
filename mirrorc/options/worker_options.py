"""Determines the workers of a step, which have joined or belong to a plan's world, and checks their devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mirrorc.cluster import Round
from mirrorc.ir.devices import Device, parse_devices
from mirrorc.ir.links import why_memory_is_not_shared
from mirrorc.ir.workers import Workers
from mirrorc.messages.wording import counted


def joined_workers(compilation: Round, devices: Sequence[Device], timeout_seconds: float) -> Workers:
    """Exchanges the numbers of devices between the joined workers, and returns these workers.

    Raises:
        ValueError: the workers' devices are of several types, or one worker has several GPUs; all workers raise it.
        CommunicationError: a worker sent nothing in time.
    """
    (kind,) = {device.torch_device.type for device in devices}
    workers = compilation.workers
    answers = compilation.all_say(f"{len(devices)} {kind}", timeout_seconds=timeout_seconds)
    numbers, kinds = zip(*(each.split() for each in answers), strict=True)
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        raise ValueError(
            f"{workers[0]} has devices of the type {kinds[0]!r}, {workers[other]} of the type {kinds[other]!r}: "
            "nothing joins them; give all workers devices of one type"
        )
    several = next((rank for rank, number in enumerate(numbers) if kinds[0] != "cpu" and number != "1"), None)
    if several is not None:
        raise ValueError(
            f"{workers[several]} has {numbers[several]} GPUs: a worker of several exchanges the gradients of one GPU; "
            "start a worker for each GPU (torchrun --nproc-per-node=gpu), and give each its own, "
            "devices=[f'cuda:{mirrorc.cluster.find_place().local_rank}']"
        )
    return Workers(tuple(map(int, numbers)), compilation.rank)


def worker_devices(workers: Workers, devices: int | Sequence[str | torch.device] | None) -> tuple[Device, ...]:
    """The devices of this worker; for None, as many as its world says. Raises ValueError for another number."""
    if not workers.devices_per_worker:
        return parse_devices(devices)
    number = workers.devices_per_worker[workers.rank]
    names = parse_devices(number if devices is None else devices)
    if len(names) != number:
        raise ValueError(
            f"devices names {counted(len(names), 'device')}, but worker {workers.rank} of the world has {number}: leave devices "
            "out, or give World(devices_per_worker=...) the number of each worker's devices"
        )
    return names


def check_devices_of_worker(workers: Workers, devices: Sequence[Device], disable: Sequence[str]) -> None:
    """Refuses several devices on one of several workers unless they share their parameters."""
    if not workers.are_several:
        return
    if len(devices) > 1 and (why := why_memory_is_not_shared(devices)):
        raise ValueError(
            f"this worker, one of several, has {len(devices)} devices, and {why}: a worker would send each gradient as often as "
            "it has devices; give each worker one device"
        )
    if len(devices) > 1 and "share-parameters" in disable:
        raise ValueError(
            f"disable= leaves out 'share-parameters', and this worker, one of several, has {len(devices)} devices: these "
            "need to share their parameters, so that a worker sends each sum once; leave the pass in, or give each worker one "
            "device"
        )
