"""Parts, slots and norms of buckets."""
