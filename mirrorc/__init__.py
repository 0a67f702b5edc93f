"""mirrorc: a data-parallel compiler for PyTorch models, whose schedule you can read, prove and replay."""

from importlib.metadata import version

from mirrorc import all_reduce_algorithms, cluster, packing
from mirrorc.api import compile
from mirrorc.calls.batch_sharding import shard_batch
from mirrorc.capture.call.arguments import PerReplica, replicated
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
from mirrorc.options.clipping import ClipGradNorm
from mirrorc.options.tf_communication import CommunicationOptions
from mirrorc.pipeline.pipeline_edits import Placed, after, before
from mirrorc.power_sgd import PowerSGD
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
