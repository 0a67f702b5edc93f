"""Of buckets: parts, slots, norms."""
