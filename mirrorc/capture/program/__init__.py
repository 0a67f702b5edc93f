"""Captures the graphs of all shards as one program."""
