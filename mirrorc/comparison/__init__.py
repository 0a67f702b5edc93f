"""The differences of two printed programs in words; `mirrorc.comparison.diff` is the entry point."""
