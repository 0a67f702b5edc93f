"""The calls of a step: their stages, the lock around them, reports, and the shard of this worker."""
