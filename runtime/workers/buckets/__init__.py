"""Exchange of buckets: sums, shards, factors, compressed payloads."""
