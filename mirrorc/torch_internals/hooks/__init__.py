"""Modes, hooks and observers of the user's thread."""
