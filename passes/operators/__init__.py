"""CAPTURED: operators rewritten, recomputed, laid out."""
