"""What is sent of buckets: sums, parts, factors, compressed payloads."""
