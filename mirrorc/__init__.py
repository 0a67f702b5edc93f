"""mirrorc: a data-parallel compiler for PyTorch models, whose schedule you can read, prove and replay."""

from mirrorc.api import Step, compile
from mirrorc.errors import CaptureError, CommunicationError, ExecutionError, MirrorcError, PassError, VerifyError
from mirrorc.inputs import PerReplica, replicated
from mirrorc.pass_manager import Placed, after, before
from mirrorc.program import Program

__all__ = [
    "CaptureError",
    "CommunicationError",
    "ExecutionError",
    "MirrorcError",
    "PassError",
    "PerReplica",
    "Placed",
    "Program",
    "Step",
    "VerifyError",
    "after",
    "before",
    "compile",
    "replicated",
]
