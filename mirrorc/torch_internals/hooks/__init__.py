"""Modes, hooks and observers."""
