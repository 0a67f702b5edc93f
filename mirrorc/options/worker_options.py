"""Determines the workers of a step, joined or planned, and checks their devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mirrorc.cluster import Round
from mirrorc.ir.devices import Device, parse_devices
from mirrorc.ir.links import why_memory_is_not_shared
from mirrorc.ir.workers import Workers
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted


def joined_workers(compilation: Round, devices: Sequence[Device], timeout_seconds: float) -> Workers:
    """The joined workers, after an exchange of their numbers of devices.

    Raises:
        ValueError: the workers' devices are of several types, or a worker has several GPUs; raised by all workers.
        CommunicationError: a worker sent nothing in time.
    """
    (kind,) = {device.torch_device.type for device in devices}
    workers = compilation.workers
    answers = compilation.all_say(f"{len(devices)} {kind}", timeout_seconds=timeout_seconds)
    numbers, kinds = zip(*(each.split() for each in answers), strict=True)
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        why = f"those of {workers[0]} are {kinds[0]!r}, those of {workers[other]} {kinds[other]!r}, and nothing joins them"
        fix = "devices=['cpu:0'] on all workers, or devices=['cuda:0'] on all"
        raise problem(ValueError, "MC6102: workers have devices of different types", why, fix)
    several = next((rank for rank, number in enumerate(numbers) if kinds[0] != "cpu" and number != "1"), None)
    if several is not None:
        why = "a worker exchanges the gradients of one GPU"
        fix = "torchrun --nproc-per-node=gpu, and devices=[f'cuda:{mirrorc.cluster.find_place().local_rank}']"
        raise problem(ValueError, f"MC6103: {workers[several]} has {numbers[several]} GPUs, and may have one", why, fix)
    return Workers(tuple(map(int, numbers)), compilation.rank)


def worker_devices(workers: Workers, devices: int | Sequence[str | torch.device] | None) -> tuple[Device, ...]:
    """This worker's devices; for None, as many as its world says. Raises ValueError for another number."""
    if not workers.devices_per_worker:
        return parse_devices(devices)
    number = workers.devices_per_worker[workers.rank]
    names = parse_devices(number if devices is None else devices)
    if len(names) != number:
        raise problem(
            ValueError,
            f"MC6104: devices= lists {counted(len(names), 'device')}, but worker {workers.rank} of the World has {number}",
            "World(devices_per_worker=...) fixes each worker's number",
            ("leave devices= out", "World(devices_per_worker=(2, 2)), a number for each worker"),
        )
    return names


def check_devices_of_worker(workers: Workers, devices: Sequence[Device], disable: Sequence[str]) -> None:
    """With several workers, refuses several devices in one worker unless they share their parameters."""
    if not workers.are_several:
        return
    if len(devices) > 1 and (why := why_memory_is_not_shared(devices)):
        raise problem(
            ValueError,
            f"MC6103: this worker, one of several, has {len(devices)} devices, which do not share their parameters here",
            f"{why}, and a worker would send each gradient as often as it has devices",
            f"devices=[{devices[0].name!r}], one device for each worker",
        )
    if len(devices) > 1 and "share-parameters" in disable:
        raise problem(
            ValueError,
            f"MC6103: this worker, one of several, has {len(devices)} devices, and disable= leaves out 'share-parameters'",
            "they need to share their parameters, so that a worker sends each sum once",
            ("take 'share-parameters' out of disable=", f"devices=[{devices[0].name!r}], one device for each worker"),
        )
