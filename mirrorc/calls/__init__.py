"""Around one call: its kind, one at a time, reports, the batch of this worker."""
