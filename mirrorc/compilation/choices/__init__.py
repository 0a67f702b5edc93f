"""Choices by measurement or by all workers."""
