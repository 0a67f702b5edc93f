"""Captures a program: a graph for each distinct shard shape."""
