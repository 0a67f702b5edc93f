"""CAPTURED to OUTLINED: buckets, regions, slots, microbatches."""
