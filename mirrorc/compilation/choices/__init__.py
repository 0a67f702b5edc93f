"""Choices made by measurement, or by all workers together."""
