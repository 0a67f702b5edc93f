"""What carries collectives: one file per kind of link."""

from __future__ import annotations

from collections.abc import Sequence

from mirrorc.ir.devices import Device
from mirrorc.runtime.communication.base import Communicator
from mirrorc.runtime.communication.copies import CopyCommunicator
from mirrorc.runtime.communication.nccl import NcclCommunicator
from mirrorc.runtime.communication.rendezvous import Aborted
from mirrorc.runtime.communication.shared_memory import SharedMemoryCommunicator

__all__ = [
    "Aborted",
    "Communicator",
    "CopyCommunicator",
    "NcclCommunicator",
    "SharedMemoryCommunicator",
    "communicator_for",
]

_BY_LINK: dict[str, type[Communicator]] = {
    "shared-memory": SharedMemoryCommunicator,
    "nccl": NcclCommunicator,
    "copy": CopyCommunicator,
}


def communicator_for(link: str, devices: Sequence[Device], timeout_seconds: float) -> Communicator:
    """The communicator of a link, as `mirrorc.passes.LowerCollectives` names it."""
    return _BY_LINK[link](devices, timeout_seconds)
