"""Every public name of mirrorc, for `mirrorc/__init__.py`, which imports them when the first is used."""

from mirrorc import all_reduce_algorithms, cluster, compression, packing
from mirrorc.api import compile, data_parallel, plan, train_step
from mirrorc.calls.worker_batch import shard_batch
from mirrorc.capture.call.argument_markers import PerReplica, batch_dim, examples, replicated
from mirrorc.capture.call.traced_outputs import summed
from mirrorc.checkpoints import load_checkpoint, save_checkpoint
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
from mirrorc.options.communication import Communication
from mirrorc.options.compiler import Compiler
from mirrorc.options.debug import Debug
from mirrorc.options.gradient_clipping import ClipGradNorm
from mirrorc.options.memory import Memory
from mirrorc.pipeline.pipeline_edits import Placed, after, before
from mirrorc.serialization import parse
from mirrorc.step import Step, join

__all__ = [
    "CaptureError",
    "ClipGradNorm",
    "Communication",
    "CommunicationError",
    "Compiler",
    "Debug",
    "ExecutionError",
    "LossCheck",
    "Memory",
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
    "after",
    "all_gather",
    "all_reduce",
    "all_reduce_algorithms",
    "batch_dim",
    "before",
    "check_loss",
    "cluster",
    "compile",
    "compression",
    "data_parallel",
    "examples",
    "join",
    "load_checkpoint",
    "num_replicas",
    "packing",
    "parse",
    "plan",
    "replica_id",
    "replicated",
    "save_checkpoint",
    "shard_batch",
    "summed",
    "train_step",
]
