"""Inductor: compiling a region, its cache, its allocations."""
