"""A call as data: arguments, shards, outputs, changing numbers."""
