"""REPLICATED to SCHEDULED: packing, reducing, updating on all devices of a process."""
