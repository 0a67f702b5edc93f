"""Which function runs each node."""

from mirrorc.runtime.execution.binding.binder import binds

__all__ = ["binds"]
