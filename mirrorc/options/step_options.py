"""The options of a step, and checks of options that do not depend on the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mirrorc.capture.front_ends.fallback import Ladder
from mirrorc.cluster import Cluster, Round
from mirrorc.ir import workers
from mirrorc.ir.devices import Device
from mirrorc.ir.links import why_memory_is_not_shared, why_no_factors_for_workers
from mirrorc.options.kinds import Exchange, LossReduction
from mirrorc.passes import FactorGradients, ShareParameters
from mirrorc.pipeline.protocol import Pass
from mirrorc.runtime.codegen.backends import Backend
from mirrorc.user.optimizer_groups import OptimizerGroups


@dataclass(frozen=True)
class StepOptions:
    """What `mirrorc.compile` was asked for, checked; the fields are its arguments."""

    model: nn.Module
    optimizers: OptimizerGroups
    loss_fn: Callable[[Any, Any], Any] | None
    loss_reduction: LossReduction
    backend: Backend
    ladder: Ladder  # of front ends
    devices: tuple[Device, ...]
    pipeline: Sequence[Pass]
    dump: Path | None
    print_after: Sequence[str]
    print_after_all: bool
    timeout_seconds: float
    record: bool
    cuda_graphs: bool
    return_outputs: bool
    microbatches: int
    activation_memory: float | None  # bytes as an int, a part of what would be taken as a float
    progress: bool
    scaler: torch.amp.GradScaler | None  # None for one that is not enabled, too
    autocast: torch.dtype | None
    check_replicas_every: int  # 0 for never
    program_workers: workers.Workers  # the joined ones, those of world=, or none besides this process
    cluster: Cluster | None  # the workers that have joined
    compilation: Round | None  # in which workers compile this step together
    exchange: Exchange  # how workers send gradients
    overlap_next_step: bool  # whether a step of several workers may return with buckets in flight
    dynamic: bool | None  # whether sizes of arguments become symbols; None if they do when they change
    remarks: tuple[str, ...]  # on what was asked for, for every program of the step


_LONGEST_WAIT_SECONDS = 365 * 24 * 3600.0  # the operating system's clocks do not take infinity


def check_loss_function(loss_fn: Any) -> None:
    """Refuses a class in place of an object of it.

    Raises:
        TypeError: names the class and the remedy.
    """
    if isinstance(loss_fn, type):
        raise TypeError(
            f"loss_fn is the class {loss_fn.__name__}: give an object of it, loss_fn={loss_fn.__name__}(), or a function "
            "loss_fn(output, target)"
        )


def wait_seconds(timeout_seconds: float) -> float:
    """The longest time of a wait.

    Raises:
        ValueError: it is not positive.
    """
    if not timeout_seconds > 0:
        raise ValueError(
            f"timeout_seconds is {timeout_seconds!r}: give a positive number of seconds (math.inf for no bound)"
        )
    return min(float(timeout_seconds), _LONGEST_WAIT_SECONDS)


def check_cuda_graphs(cuda_graphs: bool, devices: Sequence[Device]) -> None:
    """Refuses CUDA graphs on anything but one GPU.

    Raises:
        ValueError: names the devices and the remedy.
    """
    if not cuda_graphs:
        return
    names = ", ".join(device.name for device in devices)
    if devices[0].torch_device.type != "cuda":
        raise ValueError(f"cuda_graphs=True is for a GPU, not for {names}: leave it out")
    if len(devices) > 1:
        raise ValueError(
            f"cuda_graphs=True is for one device, not for {names}: several wait for one another in Python between their calls, "
            "which a graph does not replay; leave it out, or name one GPU"
        )


def check_finite_option(
    check_finite: Any, passes: Any, disable_passes: Sequence[str], pipeline: Sequence[Pass], cuda_graphs: bool
) -> None:
    """Refuses values of ``check_finite`` that contradict other options.

    Args:
        check_finite, passes, disable_passes, cuda_graphs: the options.
        pipeline: the passes that follow from them.

    Raises:
        ValueError: names the argument and the remedy.
    """
    if check_finite and passes is not None:
        raise ValueError(
            f"check_finite={check_finite!r} has no part in a pipeline given with passes=: put mirrorc.passes.CheckFinite() "
            "there, after ShareParameters, or use add_passes and disable_passes in place of passes"
        )
    if check_finite and "check-finite" in disable_passes:
        raise ValueError(
            f"check_finite={check_finite!r} asks for the pass 'check-finite', which disable_passes leaves out: leave out one"
        )
    if cuda_graphs and any(compiler_pass.name == "check-finite" for compiler_pass in pipeline):
        raise ValueError(
            "check_finite cannot be used with cuda_graphs=True: the host looks at what is finite in every step, before anything "
            "is written, and a graph runs without it; leave out one of them"
        )


def check_exchange(
    exchange: Exchange,
    program_workers: workers.Workers,
    devices: Sequence[Device],
    pipeline: Sequence[Pass],
    link: str | None,
) -> None:
    """Refuses to send factors where that cannot be.

    Raises:
        ValueError: says why, and the remedy.
    """
    if exchange != "factors":
        return
    if not any(isinstance(one, FactorGradients) for one in pipeline):
        raise ValueError(
            "exchange='factors' needs the pass 'factor-gradients', which this pipeline leaves out (as exact_order=True does): "
            "put it in, or give exchange='auto'"
        )
    if not program_workers.are_several:
        return
    if not (program_workers.are_alike or program_workers.shards_optimizer):
        raise ValueError(
            "exchange='factors' cannot be used over workers that have different numbers of devices: they would make other bits "
            "of one product; give all workers the same number, or exchange='auto', or let each make its part alone with "
            "shard_optimizer=True"
        )
    if why := why_no_factors_for_workers(link, devices):
        raise ValueError(
            f"exchange='factors' cannot be used on {', '.join(map(str, devices))}: {why}; give exchange='auto'"
        )


def check_replicas_option(check_replicas_every: int | None) -> int:
    """The number of steps between two comparisons of the replicas; 0 for none.

    Raises:
        ValueError: it is negative.
    """
    every = check_replicas_every or 0
    if every < 0:
        raise ValueError(f"check_replicas_every is {every}: give a positive number of steps, or 0 for never")
    return every


def why_replicas_are_not_compared(devices: Sequence[Device], pipeline: Sequence[Pass]) -> str:
    """A remark for a program whose replicas are to be compared and have one copy of everything; else empty."""
    if len(devices) == 1:
        why = "there is one device"
    elif any(isinstance(one, ShareParameters) for one in pipeline) and not why_memory_is_not_shared(devices):
        why = "parameters and optimizer state are kept once for all devices"
    else:
        return ""
    return f"check_replicas_every has nothing to compare: {why}"


def dump_directory(dump: str | os.PathLike[str] | None) -> Path | None:
    """The directory for dumps: the option, else the environment variable MIRRORC_DUMP, else None.

    Raises:
        ValueError: it is no directory, and none can be made there.
    """
    if dump is None:
        chosen = os.environ.get("MIRRORC_DUMP")
        return checked_directory("MIRRORC_DUMP", chosen) if chosen else None
    return checked_directory("dump", dump) if dump else None


def checked_directory(option: str, path: str | os.PathLike[str]) -> Path:
    """The path of a directory that exists or can be made.

    Raises:
        ValueError: there is a file in its place, or of a directory above it; names the option.
    """
    directory = Path(path)
    existing = next((place for place in (directory, *directory.parents) if place.exists()), None)
    if existing is not None and not existing.is_dir():
        raise ValueError(f"{option} is {str(path)!r}, but {existing} is a file: give a directory, existing or new")
    return directory


def example_call(example_inputs: tuple[Any, ...] | dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that ``example_inputs`` holds: a tuple, a dict, or a pair of both."""
    if isinstance(example_inputs, dict):
        return (), example_inputs
    if len(example_inputs) == 2 and isinstance(example_inputs[0], tuple) and isinstance(example_inputs[1], dict):
        return example_inputs
    return example_inputs, {}
