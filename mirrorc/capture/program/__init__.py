"""Graphs of all shards put together to one program."""
