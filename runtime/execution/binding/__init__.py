"""Functions of nodes. Importing this package imports the files that register how operations run."""

from mirrorc.runtime.execution.binding import accumulation, clipping, compression, reserved_memory
from mirrorc.runtime.execution.binding.binder import binds

__all__ = ["accumulation", "binds", "clipping", "compression", "reserved_memory"]
