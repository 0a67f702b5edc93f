"""Choices by measurement or by all workers: exchange, gradient order."""
