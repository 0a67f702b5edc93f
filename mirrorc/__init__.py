"""mirrorc: a data-parallel compiler for PyTorch models, whose schedule you can read, prove and replay."""

from importlib.metadata import version

from mirrorc import all_reduce_algorithms, cluster, packing
from mirrorc.api import compile
from mirrorc.batch_parts import shard_batch
from mirrorc.capture.arguments import PerReplica, replicated
from mirrorc.capture.traced_outputs import summed
from mirrorc.clipping import ClipGradNorm
from mirrorc.communication_options import CommunicationOptions
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
from mirrorc.joins import join
from mirrorc.loss_check.check import LossCheck, check_loss
from mirrorc.pipeline.placement import Placed, after, before
from mirrorc.power_sgd import PowerSGD
from mirrorc.replicas import all_gather, all_reduce, num_replicas, replica_id
from mirrorc.step import Step
from mirrorc.top_k import TopK

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
    "PowerSGD",
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
    "join",
    "num_replicas",
    "packing",
    "replica_id",
    "replicated",
    "shard_batch",
    "summed",
]

__version__ = version("mirrorc")
