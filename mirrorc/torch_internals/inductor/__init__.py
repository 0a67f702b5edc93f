"""Inductor: compilation, cache, allocations."""
