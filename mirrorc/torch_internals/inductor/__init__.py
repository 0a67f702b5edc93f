"""Inductor: compiles a region; its cache and its allocations."""
