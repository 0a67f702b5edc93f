"""Operators that mirrorc registers with torch."""
