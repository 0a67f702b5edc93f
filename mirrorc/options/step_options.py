"""The checked options of a step, and checks that need no model."""

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
from mirrorc.ir import workers
from mirrorc.ir.devices import Device
from mirrorc.ir.links import why_memory_is_not_shared
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.options.communication import Exchange
from mirrorc.options.table import LossReduction
from mirrorc.passes import ShareParameters
from mirrorc.pipeline.protocol import Pass
from mirrorc.runtime.codegen.backends import Backend
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
    program_workers: workers.Workers  # the joined ones, those of a plan's world, or this process alone
    cluster: Cluster | None  # the workers that have joined
    compilation: Round | None  # the round in which workers compile this step together
    exchange: Exchange  # the form of workers' gradients
    program: str | os.PathLike[str] | Program | None  # an edited one
    dynamic: bool | None  # sizes of arguments are symbols; None: once they change
    remarks: tuple[str, ...]  # on the arguments, for every program of the step
    is_module: bool = False  # the user's loop has the loss and the updates


LONGEST_WAIT_SECONDS = 365 * 24 * 3600.0
"""Used for infinity, which the operating system's clocks do not accept."""


def check_loss_function(loss_fn: Any) -> None:
    """Refuses a class in place of an instance."""
    if isinstance(loss_fn, type):
        raise problem(
            TypeError,
            f"MC1401: loss_fn is the class {loss_fn.__name__}, not an object of it",
            fix=(f"loss_fn={loss_fn.__name__}()", "give a function loss_fn(output, target)"),
        )


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
    """The option, else the environment variable MIRRORC_DUMP, else None."""
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
