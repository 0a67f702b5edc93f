"""Says in words what differs between two printed programs; `mirrorc.comparison.diff` is the entry point."""
