"""The options of a step, and checks of options that do not depend on the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from mirrorc.capture.front_ends import FrontEnd
from mirrorc.ir.devices import Device
from mirrorc.ir.links import why_memory_is_not_shared
from mirrorc.passes import ShareParameters
from mirrorc.pipeline.protocol import Pass
from mirrorc.runtime.codegen.backends import Backend

LossReduction = Literal["mean", "sum"]
Auto = Literal["auto"]

# What can be declared outside of the package, too, is any text; these are the names that are there from the beginning.
BackendName = Literal["inductor", "eager"] | str
LinkName = Literal["shared-memory", "nccl", "copy"] | str
FrontEndName = Literal["auto", "dynamo"] | str
FiniteCheck = bool | Literal["skip"]


@dataclass(frozen=True)
class StepOptions:
    """What `mirrorc.compile` was asked for, checked; the fields are its arguments."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    loss_reduction: LossReduction
    backend: Backend
    front_end: FrontEnd
    devices: tuple[Device, ...]
    pipeline: Sequence[Pass]
    to_measure: Pass | None  # the pass of the pipeline whose bucket sizes are chosen by measurement
    dump: Path | None
    print_after: Sequence[str]
    print_after_all: bool
    timeout_seconds: float
    record: bool
    cuda_graphs: bool
    check_replicas_every: int  # 0 for never
    remarks: tuple[str, ...]  # on what was asked for, for every program of the step


def check_cuda_graphs(cuda_graphs: bool, devices: Sequence[Device]) -> None:
    """Refuses CUDA graphs on anything but one GPU.

    Raises:
        TypeError, ValueError: names the devices and the remedy.
    """
    if not isinstance(cuda_graphs, bool):
        raise TypeError(f"cuda_graphs is {cuda_graphs!r}: say True, for one GPU, or False")
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


def check_choices(
    loss_fn: Any,
    loss_reduction: Any,
    timeout_seconds: float,
    record: bool,
    exact_order: bool,
) -> None:
    """Refuses values that are invalid for any model.

    Raises:
        TypeError, ValueError: names the argument and the remedy.
    """
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn is a {type(loss_fn).__name__}: give a function loss_fn(output, target)")
    if isinstance(loss_fn, type):
        raise TypeError(
            f"loss_fn is the class {loss_fn.__name__}: give an object of it, loss_fn={loss_fn.__name__}(), or a function "
            "loss_fn(output, target)"
        )
    if loss_reduction not in get_args(LossReduction):
        raise ValueError(
            f"loss_reduction is {loss_reduction!r}: say 'mean' or 'sum', as the loss does over its examples"
        )
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds is {timeout_seconds!r}: give a positive number of seconds")
    if not isinstance(record, bool):
        raise TypeError(f"record is {record!r}: say True, for step.explain() and step.timeline(), or False")
    if not isinstance(exact_order, bool):
        raise TypeError(f"exact_order is {exact_order!r}: say True, to leave out passes that change bits, or False")


def check_finite_option(
    check_finite: Any, passes: Any, disable_passes: Sequence[str], pipeline: Sequence[Pass], cuda_graphs: bool
) -> None:
    """Refuses values of ``check_finite`` that are invalid, or contradict other options.

    Args:
        check_finite, passes, disable_passes, cuda_graphs: the options.
        pipeline: the passes that follow from them.

    Raises:
        TypeError, ValueError: names the argument and the remedy.
    """
    if not (isinstance(check_finite, bool) or check_finite == "skip"):
        raise TypeError(
            f"check_finite is {check_finite!r}: say True, to raise an error where a loss or gradient is not finite, 'skip', to "
            "leave such updates out, or False"
        )
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


def check_replicas_option(check_replicas_every: Any) -> int:
    """The number of steps between two comparisons of the replicas; 0 for none.

    Raises:
        TypeError, ValueError: it is no such number.
    """
    if check_replicas_every is None:
        return 0
    if not isinstance(check_replicas_every, int) or isinstance(check_replicas_every, bool):
        raise TypeError(f"check_replicas_every is {check_replicas_every!r}: give a number of steps, or 0 for never")
    if check_replicas_every < 0:
        raise ValueError(
            f"check_replicas_every is {check_replicas_every}: give a positive number of steps, or 0 for never"
        )
    return check_replicas_every


def why_replicas_are_not_compared(devices: Sequence[Device], pipeline: Sequence[Pass]) -> str:
    """A remark for a program whose replicas are to be compared and have one copy of everything; else empty."""
    if len(devices) == 1:
        why = "there is one device"
    elif any(isinstance(one, ShareParameters) for one in pipeline) and not why_memory_is_not_shared(devices):
        why = "parameters and optimizer state are kept once for all devices"
    else:
        return ""
    return f"check_replicas_every has nothing to compare: {why}"


def check_bucket_sizes(bucket_cap_mb: Any, first_bucket_mb: Any, passes: Any, disable_passes: Sequence[str]) -> None:
    """Refuses a text other than "auto" as a bucket size, and "auto" where it cannot choose.

    Raises:
        ValueError: names the argument and the remedy.
    """
    if isinstance(bucket_cap_mb, str) and bucket_cap_mb != "auto":
        raise ValueError(
            f"bucket_cap_mb is {bucket_cap_mb!r}: give a positive number of MiB (math.inf for one bucket), or 'auto' to choose "
            "by measurement"
        )
    if bucket_cap_mb != "auto":
        return
    if passes is not None:
        raise ValueError(
            "bucket_cap_mb='auto' has no part in a pipeline given with passes=: give PlanBuckets its numbers there, or use "
            "add_passes and disable_passes in place of passes"
        )
    if "plan-buckets" in disable_passes:
        raise ValueError(
            "bucket_cap_mb='auto' chooses for the pass 'plan-buckets', which disable_passes leaves out: leave out one of them"
        )
    if first_bucket_mb is not None:
        raise ValueError(
            f"bucket_cap_mb='auto' chooses the size of the first bucket, too, but first_bucket_mb is {first_bucket_mb!r}: leave "
            "it out, or give both as numbers"
        )


def check_additions(add_passes: Any) -> None:
    """Refuses a placed pass that is not in a list.

    Raises:
        TypeError: names the remedy.
    """
    if not isinstance(add_passes, Iterable):
        raise TypeError(
            f"add_passes is a {type(add_passes).__name__}: give a list, such as [mirrorc.after('pack-gradients', it)]"
        )


def dump_directory(dump: str | os.PathLike[str] | None) -> Path | None:
    """The directory for dumps: the option, else the environment variable MIRRORC_DUMP, else None.

    Raises:
        TypeError, ValueError: it is no directory, and none can be made there.
    """
    if dump is None:
        chosen = os.environ.get("MIRRORC_DUMP")
        return checked_directory("MIRRORC_DUMP", chosen) if chosen else None
    if not isinstance(dump, (str, os.PathLike)):
        raise TypeError(f"dump is {dump!r}: give the path of a directory, or None")
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


def example_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that ``example_inputs`` holds.

    Raises:
        TypeError: neither a tuple, nor a dict, nor a pair of both.
    """
    if isinstance(example_inputs, dict):
        return (), example_inputs
    if isinstance(example_inputs, tuple):
        if len(example_inputs) == 2 and isinstance(example_inputs[0], tuple) and isinstance(example_inputs[1], dict):
            return example_inputs
        return example_inputs, {}
    raise TypeError(
        f"example_inputs is a {type(example_inputs).__name__}: give a tuple of positional arguments, a dict of keyword "
        "arguments, or a pair of both"
    )
