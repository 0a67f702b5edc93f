"""Binds nodes to functions. Importing this package registers how operations run."""

from mirrorc.runtime.execution.binding import compression, updates
from mirrorc.runtime.execution.binding.binder import binds

__all__ = ["binds", "compression", "updates"]
