"""A call as data: arguments, shards, types, outputs, what changes between calls."""
