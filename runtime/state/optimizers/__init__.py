"""The user's optimizers over flat buckets."""
