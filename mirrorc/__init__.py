"""mirrorc: a data-parallel compiler for PyTorch models, whose schedule you can read, prove and replay."""

from mirrorc.api import Step, compile
from mirrorc.errors import CaptureError, CommunicationError, ExecutionError, MirrorcError, PassError, VerifyError
from mirrorc.inputs import PerReplica, replicated
from mirrorc.program import Program

__all__ = [
    "CaptureError",
    "CommunicationError",
    "ExecutionError",
    "MirrorcError",
    "PassError",
    "PerReplica",
    "Program",
    "Step",
    "VerifyError",
    "compile",
    "replicated",
]
