"""Binds nodes to functions. Importing this package registers how operations run."""

from mirrorc.runtime.execution.binding import accumulate, clipping, compression, reserved_blocks, updates
from mirrorc.runtime.execution.binding.binder import binds

__all__ = ["accumulate", "binds", "clipping", "compression", "reserved_blocks", "updates"]
