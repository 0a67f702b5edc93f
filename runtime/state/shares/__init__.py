"""A device's share of a bucket, made of pieces."""
