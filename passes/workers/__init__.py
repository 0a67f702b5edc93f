"""SCHEDULED: exchanges between workers."""
