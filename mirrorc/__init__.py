"""mirrorc: a data-parallel compiler for PyTorch models, whose schedule you can read, prove and replay."""

from importlib.metadata import version
from typing import Any

from mirrorc import all_reduce_algorithms, cluster, compression, packing
from mirrorc.api import compile
from mirrorc.calls.worker_batch import shard_batch
from mirrorc.capture.call.call_arguments import PerReplica, replicated
from mirrorc.capture.call.traced_outputs import summed
from mirrorc.collectives import all_gather, all_reduce, num_replicas, replica_id
from mirrorc.compression import TopK
from mirrorc.errors import (
    CaptureError,
    CommunicationError,
    ExecutionError,
    MirrorcError,
    NonFiniteError,
    PassError,
    VerifyError,
)
from mirrorc.ir.program import Program
from mirrorc.ir.workers import World
from mirrorc.loss_check.check import LossCheck, check_loss
from mirrorc.options.gradient_clipping import ClipGradNorm
from mirrorc.options.tf_communication import CommunicationOptions
from mirrorc.pipeline.pipeline_edits import Placed, after, before
from mirrorc.step import Step, join

__all__ = [
    "CaptureError",
    "ClipGradNorm",
    "CommunicationError",
    "CommunicationOptions",
    "ExecutionError",
    "LossCheck",
    "MirrorcError",
    "NonFiniteError",
    "PassError",
    "PerReplica",
    "Placed",
    "Program",
    "Step",
    "TopK",
    "VerifyError",
    "World",
    "__version__",
    "after",
    "all_gather",
    "all_reduce",
    "all_reduce_algorithms",
    "before",
    "check_loss",
    "cluster",
    "compile",
    "compression",
    "join",
    "num_replicas",
    "packing",
    "replica_id",
    "replicated",
    "shard_batch",
    "summed",
]

__version__ = version("mirrorc")


def __getattr__(name: str) -> Any:
    if name == "PowerSGD":
        raise AttributeError(
            "mirrorc.PowerSGD is no part of mirrorc any more: its place is examples/power_sgd.py, a payload of one's own for "
            "compression=; copy it, or see mirrorc.compression.Payload"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
