"""SCHEDULED: clipping, unscaling, finite checks, and work fused into updates."""
