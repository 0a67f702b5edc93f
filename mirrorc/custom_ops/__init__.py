"""Operators of our own, registered with torch."""
