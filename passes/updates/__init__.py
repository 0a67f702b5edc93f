"""SCHEDULED: conditions and scales of updates."""
