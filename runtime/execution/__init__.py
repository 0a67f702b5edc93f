"""Runs lowered programs."""
