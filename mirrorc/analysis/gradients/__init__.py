"""Factors, rows and origins of gradients."""
