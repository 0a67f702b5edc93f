"""Ordered queues over process groups."""
