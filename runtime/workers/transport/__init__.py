"""Connections between workers, over process groups."""
