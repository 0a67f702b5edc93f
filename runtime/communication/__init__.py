"""Communicators, one file for each link with collectives."""

from __future__ import annotations

from mirrorc.runtime.communication.base import (
    Communicator,
    communicator_for,
    communicators_of,
    register_communicator,
    unregister_communicator,
)
from mirrorc.runtime.communication.copies import CopyCommunicator
from mirrorc.runtime.communication.nccl import NcclCommunicator
from mirrorc.runtime.communication.rendezvous import Aborted, StepStoppedError
from mirrorc.runtime.communication.shared_memory import SharedMemoryCommunicator

__all__ = [
    "Aborted",
    "Communicator",
    "CopyCommunicator",
    "NcclCommunicator",
    "SharedMemoryCommunicator",
    "StepStoppedError",
    "communicator_for",
    "communicators_of",
    "register_communicator",
    "unregister_communicator",
]
