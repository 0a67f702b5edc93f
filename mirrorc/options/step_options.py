"""The checked options of a step, its workers, joined or planned, and checks that need no model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mirrorc.capture.front_ends.front_end import Ladder
from mirrorc.cluster import Cluster, Round
from mirrorc.ir.devices import Device, parse_devices
from mirrorc.ir.links import why_memory_is_not_shared
from mirrorc.ir.program import Program
from mirrorc.ir.workers import Workers
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted
from mirrorc.options.communication import Exchange
from mirrorc.options.table import LossReduction
from mirrorc.passes import ShareParameters
from mirrorc.pipeline.protocol import Pass
from mirrorc.runtime.codegen.regions import Backend
from mirrorc.user.optimizer_groups import OptimizerGroups


@dataclass(frozen=True)
class StepOptions:
    model: nn.Module
    optimizers: OptimizerGroups
    loss_fn: Callable[[Any, Any], Any] | None
    loss_reduction: LossReduction
    backend: Backend
    ladder: Ladder  # of front ends
    devices: tuple[Device, ...]
    pipeline: Sequence[Pass]
    dump: Path | None
    print_after: Sequence[str] | Literal["all"]
    timeout_seconds: float
    cuda_graphs: bool
    return_outputs: bool
    microbatches: int
    activation_memory: float | None  # bytes as an int, or a float as a part of the peak without the bound
    progress: bool
    scaler: torch.amp.GradScaler | None  # also None for a disabled one
    autocast: torch.dtype | None
    check_replicas_every: int  # 0 for never
    program_workers: Workers  # the joined ones, those of a plan's world, or this process alone
    cluster: Cluster | None  # the workers that have joined
    compilation: Round | None  # the round in which workers compile this step together
    exchange: Exchange  # the form of workers' gradients
    program: str | os.PathLike[str] | Program | None  # an edited one
    dynamic: bool | None  # sizes of arguments are symbols; None: once they change
    remarks: tuple[str, ...]  # on the arguments, for every program of the step
    is_module: bool = False  # the user's loop has the loss and the updates


LONGEST_WAIT_SECONDS = 365 * 24 * 3600.0
"""Used for infinity, which the operating system's clocks do not accept."""

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def check_loss_function(loss_fn: Any) -> None:
    """Refuses a class in place of an instance."""
    if isinstance(loss_fn, type):
        fix = (f"loss_fn={loss_fn.__name__}()", "give a function loss_fn(output, target)")
        raise problem(TypeError, f"MC1401: loss_fn is the class {loss_fn.__name__}, not an object of it", fix=fix)


def checked_autocast(autocast: Any, devices: Sequence[Device]) -> torch.dtype | None:
    """The dtype of autocast in forward and loss; None for the caller's autocast."""
    if autocast is None or autocast is False:
        return None
    if autocast is True:
        return torch.get_autocast_dtype(devices[0].torch_device.type)
    dtype = _DTYPES.get(autocast) if isinstance(autocast, str) else autocast
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    kind = ValueError if isinstance(autocast, str | torch.dtype) else TypeError
    fix = "give torch.bfloat16 or torch.float16, True for what torch takes on these devices, or None"
    raise problem(kind, f"MC1002: autocast is {autocast!r}", fix=fix)


def why_replicas_are_not_compared(devices: Sequence[Device], pipeline: Sequence[Pass]) -> str:
    """A remark if check_replicas_every has nothing to compare, because replicas share one copy; else empty."""
    if len(devices) == 1:
        why = "there is one device"
    elif any(isinstance(entry, ShareParameters) for entry in pipeline) and not why_memory_is_not_shared(devices):
        why = "parameters and optimizer state are kept once for all devices"
    else:
        return ""
    return f"check_replicas_every has nothing to compare: {why}"


def dump_directory(dump: str | os.PathLike[str] | None) -> Path | None:
    if dump is None:
        chosen = os.environ.get("MIRRORC_DUMP")
        return checked_directory("MIRRORC_DUMP", chosen) if chosen else None
    return checked_directory("dump", dump) if dump else None


def checked_directory(option: str, path: str | os.PathLike[str]) -> Path:
    """The path of a directory, existing or new. Raises ValueError if it or a parent is a file."""
    directory = Path(path)
    existing = next((place for place in (directory, *directory.parents) if place.exists()), None)
    if existing is not None and not existing.is_dir():
        raise ValueError(
            f"MC1002: {option} is {str(path)!r}, but {existing} is a file: give a directory, existing or new"
        )
    return directory


def joined_workers(compilation: Round, devices: Sequence[Device], timeout_seconds: float) -> Workers:
    """The joined workers, after an exchange of their numbers of devices. All raise the same errors."""
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
    """This worker's devices; for None, as many as its world says."""
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
